"""Split a layer: 1D (with sequence parallel), 2D, 2.5D and 3D, four interpreters of one table of
roles.

`apply` replaces a model's modules in place by their parallel forms; the names of modules and
parameters stay.
"""

from __future__ import annotations

from plait.parallel.tensor.apply import apply
from plait.parallel.tensor.group import ActivationLayout, TensorGroup
from plait.parallel.tensor.placement import Placement
from plait.parallel.tensor.roles import ROLES
from plait.parallel.tensor.split import TensorSplit

__all__ = ["ROLES", "ActivationLayout", "Placement", "TensorGroup", "TensorSplit", "apply"]
