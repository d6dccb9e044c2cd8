"""Arguments of `build` are checked before anything is made of them: module, loss and optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from plait.comm import World
from plait.errors import ModelError, OptimizerError, WorldSizeError
from plait.mesh import Mesh
from plait.plan import Plan

AXES = ("pp", "dp", "cp", "tp")


def check_arguments(model: object, loss: object, optimizer: object) -> None:
    """Refuse what cannot be a model, a loss or an optimizer.

    Raises:
        ModelError: the model is no module, is wrapped in DistributedDataParallel or is
            TorchScript. Or the loss is no function.
        OptimizerError: the optimizer neither is one nor makes one.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a torch.nn.Module, not {_named(model)}")
    _refuse_wrapped(model)
    _refuse_scripted(model)
    if not callable(loss):
        raise ModelError(
            f"a loss is a function of (output, targets), as F.cross_entropy, not {_named(loss)}; "
            "of a model that computes its own it is lambda output, targets: output.loss"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise OptimizerError(
            "an optimizer is one of torch.optim, or a function of parameters that makes one, as "
            f"lambda params: torch.optim.AdamW(params), not {_named(optimizer)}"
        )


def check_mesh(plan: Plan, world: World) -> None:
    """Refuse a world that was made for a plan with other axes. Errors: `WorldSizeError`."""
    wanted, found = _axes(Mesh.of(plan)), _axes(world.mesh)
    if wanted != found:
        raise WorldSizeError(
            f"the plan '{plan}' has the axes {wanted}, and the world that build got was made for "
            f"{found}; give build the plan that the world was made for, or leave out world="
        )


def _axes(mesh: Mesh) -> str:
    """The axes with several ranks, as a plan has them."""
    sizes = {name: getattr(mesh, name) for name in AXES}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp1"


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model inside which torch's own data parallelism sums gradients too."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            what = f"module '{name}'" if name else "the model"
            raise ModelError(
                f"{what} is wrapped in {type(module).__name__}, which sums gradients beside the "
                "plan and puts 'module.' before every name that is saved; give what is inside it, "
                "its .module, before Accelerator.prepare or DistributedDataParallel"
            )


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse a module whose forward is none of Python, so that no plan can divide it."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"module '{name}'" if name else "the model"
            raise ModelError(
                f"{what} is compiled to TorchScript, whose forward no plan can look into or "
                "divide; give the module that torch.jit.script or torch.jit.trace was called with"
            )


def _named(value: object) -> str:
    """The kind of a value in words, and the start of its text."""
    if isinstance(value, type):
        return f"the class {value.__name__}; make one, as {value.__name__}(...)"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
