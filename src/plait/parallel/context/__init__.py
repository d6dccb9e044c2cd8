"""Split a sequence: ring attention and Ulysses; split space: strips with a halo.

`apply` puts a parallel form in the place of every module of role `attention`. It tells modules of
role `position` where this rank's tokens stand, and gives a function that cuts a batch. Everything
else of a model sees each token alone and stays as it is. `apply_to_trunk` takes any model that has
repeated blocks, without a table of roles.
"""

from __future__ import annotations

from plait.parallel.context.apply import apply, apply_to_trunk
from plait.parallel.context.documents import check_documents
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.halo import HaloConv2d, with_halo
from plait.parallel.context.rehearsal import rehearse
from plait.parallel.context.ring import RingAttention
from plait.parallel.context.ulysses import UlyssesAttention

__all__ = [
    "ContextGroup",
    "HaloConv2d",
    "RingAttention",
    "UlyssesAttention",
    "apply",
    "apply_to_trunk",
    "check_documents",
    "rehearse",
    "with_halo",
]
