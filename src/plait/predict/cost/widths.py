"""Bytes of a number by precision, which time, memory and traffic share."""

from __future__ import annotations

BYTES = {"float64": 8, "float32": 4, "bf16": 2}
