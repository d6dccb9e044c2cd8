"""Every class that `transformers` registers for four tasks, from a tiny config, under every
plan.
"""
