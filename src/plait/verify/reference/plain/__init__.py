"""Data, losses, optimizers and layers in plain PyTorch, so that one device shares no fault."""
