"""Bytes of a number by precision, which time, memory and traffic share."""

from __future__ import annotations

from plait.plan.precisions import PRECISION

BYTES = {name: facts.num_bytes for name, facts in PRECISION.items()}
