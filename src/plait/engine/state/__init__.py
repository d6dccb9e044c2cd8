"""The state of an engine: initial values, the parts that this rank holds, checkpoints, memory."""
