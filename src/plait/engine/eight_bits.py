"""`precision:fp8`: linear layers of blocks multiply in eight bits, by torchao's `Float8Linear`.

Inputs and weights are rounded to e4m3 and gradients to e5m2, each by one scale a tensor, found when
it is needed (P. Micikevicius et al., FP8 Formats for Deep Learning, 2022). All that is kept or sent
is bf16, and masters are float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError, NotAvailable
from plait.plan import Plan
from plait.torch_internals import without_talk_of_kernels

MULTIPLE = 16
"""The rows, inputs and outputs of a product in eight bits come in multiples of it."""
LEAST_CAPABILITY = (8, 9)
"""The first NVIDIA GPUs that multiply in eight bits: Ada and Hopper."""


def is_at_hand() -> bool:
    """Whether the package that multiplies is installed."""
    return find_spec("torchao") is not None


def check(plan: Plan) -> None:
    """Raise `NotAvailable` where a plan asks for eight bits and the package for them is missing."""
    if plan.precision == "fp8" and not is_at_hand():
        raise NotAvailable(
            f"plan '{plan}': precision:fp8 multiplies by the package torchao, which is not "
            'installed: pip install "plait[fp8]", or take precision:bf16'
        )


def check_trains(plan: Plan) -> None:
    """Raise `NotAvailable` where a plan trains in eight bits and no device is made for it."""
    check(plan)
    if plan.precision == "fp8" and not torch.cuda.is_available():
        raise NotAvailable(
            f"plan '{plan}': precision:fp8 is for GPUs that multiply in eight bits, and there is "
            "none here; plait verify --dtype fp8 measures how far it drifts. To train, take "
            "precision:bf16"
        )


def install(model: nn.Module, blocks: Sequence[str], device: torch.device) -> int:
    """Let the linear layers of blocks multiply in eight bits; the number of those that do.

    Layers whose sizes are no multiples of 16 stay as they are, as do those with a forward of their
    own.

    Raises:
        NotAvailable: the device has no products in eight bits.
        ModelError: no layer is left.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise NotAvailable(
            f"precision:fp8: {torch.cuda.get_device_name(device)} has no products in eight bits; "
            "they come with compute capability 8.9 (Ada, Hopper). Take precision:bf16"
        )
    modules = {module for name in blocks for module in model.get_submodule(name).modules()}
    layers = [module for module in modules if isinstance(module, nn.Linear) and _fits(module)]
    if not layers:
        raise ModelError(
            f"precision:fp8: no block of {type(model).__name__} has a linear layer whose inputs "
            f"and outputs are multiples of {MULTIPLE}; take precision:bf16"
        )
    rounded = _rounded_layer()
    for layer in layers:
        _multiply_rounded(layer, rounded)
    return len(layers)


def _fits(layer: nn.Linear) -> bool:
    sizes = (layer.in_features, layer.out_features)
    has_own = type(layer).forward is not nn.Linear.forward or "forward" in vars(layer)
    return not has_own and not any(size % MULTIPLE for size in sizes)


def _rounded_layer() -> Any:
    """A `Float8Linear` of torchao, whose settings and forward others take."""
    without_talk_of_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sentences on its own source, where it is first compiled
        from torchao.float8 import convert_to_float8_training

    plain = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"))
    return convert_to_float8_training(plain)[0]


def _multiply_rounded(layer: nn.Linear, rounded: Any) -> None:
    """Give a layer the settings and the forward of torchao's. Parameters and hooks stay in place.

    The forward is that of a class, which all layers of a kind share: so blocks share one graph.
    """
    for name, value in vars(rounded).items():
        if name not in vars(layer):
            setattr(layer, name, value)
    changed: Any = layer
    kind: Any = type(layer)
    changed.__class__ = _rounded_kind(kind, rounded.forward.__func__)


@cache
def _rounded_kind(kind: Any, multiply: Any) -> Any:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows % MULTIPLE:
            raise ModelError(
                f"precision:fp8: a micro-batch has {rows} rows, and products in eight bits take "
                f"multiples of {MULTIPLE}; change seq_len or the samples of a micro-batch"
            )
        made: Tensor = multiply(self, x)
        return made

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
