"""`remat:auto`: which block of a plan keeps what, so that a step is fastest within its memory."""
