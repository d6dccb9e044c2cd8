"""Parameters that no plan can lay out: complex or whole numbers, shapeless, sparse, or in
shards of another engine.

So are tensors that are made of others, as a quantised one.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import UninitializedParameter

from plait.errors import ModelError, some_of
from plait.parallel.data.sharded_unit import Freed


def refuse_parameters(model: nn.Module) -> None:
    """Raise `ModelError` for the first kind of such parameters, with its name and a cure."""
    named = list(model.named_parameters())
    kind = type(model).__name__
    sharded = [name for name, param in named if isinstance(param, Freed)]
    if sharded:
        raise ModelError(
            f"the parameter {_first(sharded)} of {kind} is in shards of an engine that was built "
            "of this model before (zero3); make the model once more, build an engine of it, and "
            "engine.load(path) what engine.save(path) of the first has written"
        )
    lazy = [name for name, param in named if isinstance(param, UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"the parameter {_first(lazy)} of {kind} has no shape before a first batch, as in "
            "lazy modules; call the model on one batch before you build an engine of it"
        )
    wrapped = [name for name, param in named if hasattr(type(param), "__tensor_flatten__")]
    if wrapped:
        made = type(model.get_parameter(wrapped[0])).__name__
        raise ModelError(
            f"the parameter {_first(wrapped)} of {kind} is a {made}, a tensor that is made of "
            "others, and plans lay out plain ones; give the model before it was quantised or "
            "distributed. A frozen base in eight or four bits is [adapter] base = 'int8' or 'nf4'"
        )
    is_complex = [name for name, param in named if param.is_complex()]
    if is_complex:
        raise ModelError(
            f"the parameter {_first(is_complex)} of {kind} is complex, and a plan's "
            "precision is one of real numbers: keep torch.view_as_real(value) as the parameter, "
            "and take torch.view_as_complex of it in the forward"
        )
    whole = [name for name, param in named if not param.is_floating_point()]
    if whole:
        raise ModelError(
            f"the parameter {_first(whole)} of {kind} is of "
            f"{str(model.get_parameter(whole[0]).dtype).removeprefix('torch.')}, and parameters "
            "are cast to the plan's precision; register it as a buffer, which keeps its type"
        )
    sparse = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
    ]
    if sparse:
        raise ModelError(
            f"the embedding {_first(sparse)} of {kind} has sparse=True, and gradients are summed "
            "over ranks as dense ones; leave sparse=True out"
        )


def _first(names: Iterable[str]) -> str:
    return some_of(map(repr, names), 1)
