"""The old address of `plait.parallel.context`, for scripts that import from here."""

from plait.parallel.context.halo import HaloConv2d

__all__ = ["HaloConv2d"]
