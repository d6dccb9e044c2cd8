"""Boxes and ranges of elements, as this room calls them; they live in `mesh`, because others need
them too.
"""

from __future__ import annotations

from plait.mesh.boxes import Box, FlatRange, Rectangle

__all__ = ["Box", "FlatRange", "Rectangle"]
