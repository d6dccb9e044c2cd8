"""plait: weave every way to parallelise training into one run. The door; everything else is behind it."""

__version__ = "0.1.0"
