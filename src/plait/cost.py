"""The old address of `plait.predict.cost`, for scripts that import from here."""

from plait.predict.cost import block_table, describe, estimate

__all__ = ["block_table", "describe", "estimate"]
