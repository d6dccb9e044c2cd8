"""The adapters of a config beside its model, counted on the meta device.

The model is made by its own code, so that targets mean the layers that a run adapts. Everything
here loads torch, and only where a config has adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import ModelError
from plait.predict.cost.model.operations import Block, Elementwise, Matmul, Model, Saved, Split
from plait.predict.cost.widths import BYTES
from plait.values import JsonMapping

ADAPTER = "adapter"
"""The name of a block that is the adapter of one layer."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a config beside its model, whose own weights are frozen."""

    trained: float = 0.0
    """Numbers of adapters over those of the model; 0 without adapters, where all is trained."""
    trained_dense: float = 0.0
    """Numbers of adapters of dense layers over those of dense layers."""
    trained_experts: float = 0.0
    """Numbers of adapters of experts over those of experts."""
    coded: float = 0.0
    """The part of the model's numbers that is kept in codes."""
    coded_bytes: float = 0.0
    """Bytes of a number in codes, with its part of a scale."""
    normed: float = 0.0
    """The part of the model's numbers whose norms are taken in each forward, as DoRA does."""
    layers: tuple[tuple[Block, float], ...] = ()
    """Each kind of adapter as a block, and how many of it a layer of the model has on average."""

    def kept_share(self, precision: str) -> float:
        """Bytes of a frozen base over those that it has in a precision."""
        return 1.0 - self.coded + self.coded * self.coded_bytes / BYTES[precision]


def adapters_of(tables: JsonMapping, described: Model) -> Adapters:
    """The adapters of a config beside its model, which is `described`; without adapters all is 0.

    Raises `ModelError` for targets that match nothing, and for a model that no code here makes.
    """
    table = tables.get("adapter") or {}
    model = tables.get("model")
    if not table.get("kind"):
        return Adapters()
    if not isinstance(model, Mapping) or not ("name" in model or "python" in model):
        raise ModelError(
            "the size of adapters is counted on the model itself: give [model] name = ..., as in "
            'name = "hf" with config = ...'
        )
    base = _made(model)
    numbers = sum(param.numel() for param in base.parameters())
    from plait.models.adapter_parts import AdapterSettings
    from plait.models.adapters import adapt, coded_weights
    from plait.models.coded import bytes_of_number

    keys = {key: value for key, value in table.items() if key not in ("weights", "targets")}
    targets = table.get("targets")
    adapt(base, AdapterSettings(**keys, targets=tuple(targets) if targets else None))
    trained = sum(param.numel() for param in base.parameters() if param.requires_grad)
    formats = coded_weights(base)
    coded = sum(base.get_parameter(name).numel() for name in formats)
    width = bytes_of_number(min(formats.values())) if formats else 0.0
    experts, of_experts = _of_experts(base)
    kinds = Counter(_blocks(base, max((block.top_k for block, _ in described.runs), default=0)))
    return Adapters(
        trained=trained / numbers,
        trained_dense=(trained - of_experts) / (numbers - experts),
        trained_experts=of_experts / experts if experts else 0.0,
        coded=coded / numbers,
        coded_bytes=width,
        normed=_normed(base) / numbers if table["kind"] == "dora" else 0.0,
        layers=tuple((one, count / described.num_repeated) for one, count in kinds.items()),
    )


def _normed(model: Any) -> int:
    """The numbers of all weights that have an adapter."""
    from plait.models.adapters import adapted

    return sum(layer.weight.numel() for layer in adapted(model).values())


def _blocks(model: Any, top_k: int) -> Iterator[Block]:
    """The adapter of each layer of a model that has one, as a block.

    The two matrices of an adapter make two products more. Their result is added to the layer's own
    (Hu et al., "LoRA" (2021), section 4.1).
    """
    from plait.models.adapters import adapted, is_transposed

    roles = _roles(model)
    for name, layer in adapted(model).items():
        if not layer.adapter.keys:
            outputs, inputs = layer.weight.shape
            if is_transposed(layer):
                outputs, inputs = inputs, outputs
            yield _block(inputs, outputs, layer.adapter.rank, roles.get(name, "none"))
        for key in layer.adapter.keys:
            number = layer.get_parameter(key).shape[0]
            inputs = layer.lora_A[key].in_features
            outputs = layer.lora_B[key].out_features
            rank = layer.adapter.rank
            yield _block(inputs, outputs, rank, "column", copies=number, rows=max(1, top_k))


def _block(
    inputs: int, outputs: int, rank: int, split: Split, *, copies: int = 1, rows: int = 1
) -> Block:
    """The adapter of a layer [outputs, inputs] as a block: two products and a sum.

    A tensor axis divides the matrix that touches the dimension in which it cuts the layer.
    """
    first: Split = "row" if split == "row" else "none"
    second: Split = "column" if split == "column" else "none"
    after: Split = "column" if split == "column" else "sequence"
    operations = (
        Matmul("lora_A", inputs, rank, first, rows=rows, copies=copies),
        Matmul("lora_B", rank, outputs, second, rows=rows, copies=copies),
        Elementwise("delta", 0.0, float(rows * outputs), after),
    )
    return Block(ADAPTER, operations, Saved(), width=outputs)


def _roles(model: Any) -> dict[str, Split]:
    """How a tensor axis cuts each linear layer of a model, by name; empty without a table."""
    from plait.models import has_roles, roles_for
    from plait.patterns import matches

    if not has_roles(model):
        return {}
    try:
        table = roles_for(model)
    except ModelError:  # no tensor axis divides it
        return {}
    cuts: dict[str, Split] = {"row": "row", "column": "column"}
    return {
        name: cuts[role]
        for name, _ in model.named_modules()
        for pattern, role in table.items()
        if role in cuts and matches(pattern, name)
    }


def _of_experts(model: Any) -> tuple[int, int]:
    """The numbers of a model's packed experts, and of their adapters."""
    from plait.models.adapter_parts import parts_of
    from plait.models.expert_adapters import matrices_of

    experts = adapters = 0
    for module in model.modules():
        if matrices_of(module):
            experts += sum(param.numel() for param in module.parameters(recurse=False))
            parts = [part.get_parameter("weight") for _, part in parts_of(module)]
            adapters += sum(matrix.numel() for matrix in parts)
    return experts, adapters


def _made(model: JsonMapping) -> Any:
    import torch

    from plait.models import make, user

    keys = {key: value for key, value in model.items() if key not in ("roles", "weights")}
    with torch.device("meta"):
        if "python" in keys:
            return user.make(keys["python"], keys.get("arguments"))
        return make(keys.pop("name"), **keys)
