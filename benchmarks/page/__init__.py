"""One page of step times, memory and bytes, and the comparison of two commits."""
