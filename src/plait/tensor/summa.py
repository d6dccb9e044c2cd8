"""SUMMA (R. van de Geijn and J. Watts, 1997): the products of a q x q grid, panel by panel or gathered once."""

from __future__ import annotations

from plait.tensor.products import Gathered

Summa = Gathered
