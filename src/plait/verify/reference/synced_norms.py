"""Synchronised batch norms on one device, which has the samples of all ranks."""

from __future__ import annotations

from types import MethodType

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def on_one_device(model: nn.Module) -> None:
    """Let each `nn.SyncBatchNorm` compute as a plain one: torch's own would look for processes."""
    norms: list[nn.Module] = [one for one in model.modules() if isinstance(one, nn.SyncBatchNorm)]
    for norm in norms:
        norm.forward = MethodType(_BatchNorm.forward, norm)


def synced_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms of a model whose statistics are of all ranks' samples."""
    modules = model.modules()
    return [one for one in modules if isinstance(one, nn.SyncBatchNorm) and one.training]


def without_statistics(model: nn.Module) -> None:
    """Let synchronised batch norms return their inputs, to see what else a model does."""
    for norm in synced_norms(model):
        norm.forward = MethodType(_unchanged, norm)


def _unchanged(norm: nn.Module, input: Tensor) -> Tensor:
    return input
