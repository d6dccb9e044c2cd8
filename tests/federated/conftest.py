"""Fixtures of this folder."""

from __future__ import annotations

from tests.federated.machines import machines

__all__ = ["machines"]
