"""A run: from a config to a finished folder with metrics, checkpoints, report and comparison."""
