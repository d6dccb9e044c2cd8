"""Measures this machine: matrix products, memory, messages between ranks, and small engines."""
