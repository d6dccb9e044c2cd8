"""An atlas of public silent errors: the smallest step that shows each, and what `verify` says.

A folder is one error by the number of its public report: `entry.toml` says what users saw and what
verify must name, `steps.py` has the faulty step `broken` and its control `fixed`.
"""
