"""References: plain PyTorch on one device, for synchronous steps and for delayed gradients."""
