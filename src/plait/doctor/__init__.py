"""The doctor: what every rank is doing, seen from outside, and what is wrong with a run.

Each rank writes a flight record. A watcher compares the records of all, names what hangs or lags,
and leaves findings. Knows no torch.
"""
