"""Training steps of somebody else's: run as they are, watched at their optimizer, and judged."""
