"""A file with a reference of its own, and a gradient that is doubled in the second step."""

import torch


def reference_step(number):
    return _step(number, 1.0)


def parallel_step(number):
    return _step(number, 1.0 + number)


def _step(number, factor):
    grad = torch.arange(4.0, dtype=torch.float64) + 1 + number
    return {"loss": 1.0, "grads": {"weight": grad * factor}, "params": {"weight": -grad * factor}}
