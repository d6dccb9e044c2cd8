"""One GPU: plait beside loops by hand, and the planner's numbers beside measured ones."""
