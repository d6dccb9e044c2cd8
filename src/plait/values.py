"""Types of values that come from outside: from files, and from models.

A type checker follows them no further, so each name says what the value is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON text or a table of a TOML text: values by key."""

JsonMapping: TypeAlias = Mapping[str, Any]
"""An object of a JSON text or a table of a TOML text that is only read."""

JsonValue: TypeAlias = Any
"""Any value of a JSON or TOML text: an object, a list, a text, a number, a boolean, or nothing."""

PyTree: TypeAlias = Any
"""A tensor, or tuples, lists and dicts of trees: what models and losses take and give."""

AutogradContext: TypeAlias = Any
"""The context of a `torch.autograd.Function`: what its forward keeps for its backward."""
