"""Planted faults: `python -m tests.parity.planted` plants each, and asks `verify` for its cause."""
