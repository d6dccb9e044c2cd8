"""One strategy, step by step: a small case runs on simulated ranks, and all it does is written
down.
"""
