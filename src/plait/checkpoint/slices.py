"""Boxes and ranges of elements, under the name that this room knows them by; they live in `mesh`, where others need them too."""

from __future__ import annotations

from plait.mesh.boxes import Box, FlatRange, Rectangle

__all__ = ["Box", "FlatRange", "Rectangle"]
