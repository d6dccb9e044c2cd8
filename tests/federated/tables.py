"""The tables of a config that federated tests have in common."""

from __future__ import annotations

from typing import Any

DIGITS: dict[str, Any] = {
    "model": {
        "name": "mlp",
        "in_features": 64,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "out_features": 10,
    },
    "data": {"name": "digits"},
}
"""A small network for images of digits."""
