"""Predict: a model description, a plan and a cluster give memory, traffic and time, without torch and in milliseconds."""
