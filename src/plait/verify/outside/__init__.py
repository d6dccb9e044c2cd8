"""Training steps of other code: run as they are, watched at their optimizer, and judged."""
