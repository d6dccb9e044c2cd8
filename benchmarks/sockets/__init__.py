"""Two ranks joined by a link of a given rate."""
