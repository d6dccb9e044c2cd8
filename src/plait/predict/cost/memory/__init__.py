"""Bytes of a rank: parameters, gradients, optimizer state, activations."""
