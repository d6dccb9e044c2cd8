"""Kinds of modules that a recording takes as one node, or does not run as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from plait.forwards import computes_by_heads, is_replaced, runs_forward_of
from plait.models.layers import RMSNorm

LINEAR = "linear"
NORM = "norm"
EMBEDDING = "embedding"
ATTENTION = "attention"
OPAQUE = "opaque"
DROPOUT = "dropout"

KNOWN_NORMS = (nn.LayerNorm, nn.RMSNorm, RMSNorm)
"""Norms whose features can be cut."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer with the forward of its class, or GPT-2's Conv1D.

    One whose weight is computed from other parameters, as `weight_norm` does, is none.
    """
    transposed = type(module).__name__ == "Conv1D" and not is_replaced(module)
    return (transposed or runs_forward_of(module, nn.Linear)) and "weight" in module._parameters


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over features: by its class, or by its name and parameters."""
    known = isinstance(module, KNOWN_NORMS)
    alone = not any(True for _ in module.children()) and bool(module._parameters)
    vectors = all(param is None or param.dim() == 1 for param in module._parameters.values())
    named = type(module).__name__.endswith(("Norm", "LayerNorm", "NormP")) and alone
    plain = "Group" not in type(module).__name__ and not is_replaced(module)
    return (known or named) and vectors and plain


def is_known_norm(kind: type[nn.Module]) -> bool:
    """Whether the features of a norm can be cut: it computes what its base class does.

    A class that adds one to the weight in a forward of its own is another norm.
    """
    known = [base for base in KNOWN_NORMS if issubclass(kind, base)]
    return any(kind.forward is base.forward for base in known)


def holds_experts(module: nn.Module) -> bool:
    """Whether the weights of many experts are one parameter, which code takes by number.

    Adapters may be wrapped around them.
    """
    inner = module._modules.get("base_layer")
    if inner is not None and isinstance(getattr(module, "num_experts", None), int):
        return holds_experts(inner)
    deep = any(param is not None and param.dim() > 2 for param in module._parameters.values())
    return deep and "Experts" in type(module).__name__


def stays_still(module: nn.Module) -> bool:
    """Whether a module of torch runs as in evaluation: it writes what it sees, or is a layer."""
    return isinstance(module, nn.modules.batchnorm._NormBase) or is_dropout(module)


def is_dropout(module: nn.Module) -> bool:
    """Whether ranks that have parts of features can draw one device's mask for a module."""
    return type(module) is nn.Dropout and module.p > 0 and not is_replaced(module)


def owns_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, beside those of the modules in it."""
    return any(param is not None for param in module._parameters.values())


def out_features(module: Any) -> int:
    """Output features of a linear layer."""
    return int(module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0])


def in_features(module: Any) -> int:
    """Input features of a linear layer."""
    return int(module.weight.shape[0 if type(module).__name__ == "Conv1D" else 1])


def layer_kind(module: nn.Module, opaque: Sequence[type]) -> str | None:
    """The kind of a layer that is one node; None for a module whose code is followed."""
    kinds = (
        (OPAQUE, isinstance(module, tuple(opaque))),
        (LINEAR, is_linear(module)),
        (EMBEDDING, runs_forward_of(module, nn.Embedding)),
        (ATTENTION, runs_forward_of(module, nn.MultiheadAttention)),
        (NORM, is_norm(module)),
        (DROPOUT, is_dropout(module)),
        (OPAQUE, holds_experts(module)),
    )
    return next((kind for kind, fits in kinds if fits), None)


def splits_heads(module: nn.Module, size: int) -> bool:
    """Whether ranks can compute torch's attention by heads, with its `out_proj` as a row."""
    return computes_by_heads(module, size) and is_linear(module.get_submodule("out_proj"))
