"""Synchronised batch norms on one device, which has the samples of all ranks."""

from __future__ import annotations

from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def on_one_device(model: nn.Module) -> None:
    """Let each `nn.SyncBatchNorm` compute as a plain one: torch's own would look for processes."""
    norms: list[nn.Module] = [one for one in model.modules() if isinstance(one, nn.SyncBatchNorm)]
    for norm in norms:
        norm.forward = MethodType(_BatchNorm.forward, norm)


def are_synced(model: nn.Module) -> bool:
    """Whether a model has batch norms in training, and all take statistics over all ranks."""
    norms = [one for one in model.modules() if isinstance(one, _NormBase) and one.training]
    return bool(norms) and all(isinstance(one, nn.SyncBatchNorm) for one in norms)
