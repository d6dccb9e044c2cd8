"""Shapes that docstrings give, against the tensors of calls on simulated ranks.

Every dim has a length of its own, so a wrong name or a part forgotten does not fit by chance.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.mesh import Mesh
from plait.mesh.layouts import INVARIANT, Sharded
from plait.models.layers import CausalAttention
from plait.parallel.context import ContextGroup, RingAttention, UlyssesAttention
from plait.parallel.context.block import attend
from plait.parallel.context.ring import ring_attention
from plait.parallel.context.shared import shared_attention
from plait.parallel.tensor import column_row, layers
from plait.parallel.tensor.dropout import AttentionWithDropout, mask_like
from plait.parallel.tensor.group import ActivationLayout, ForwardContext
from plait.parallel.tensor.mode import EmbeddingRule
from plait.parallel.tensor.norms import normalise
from plait.parallel.tensor.vocabulary import cross_entropy, look_up
from tests.helpers.threaded import threaded
from tests.unit.parallel.tensor.pairs import ROLES, Sizes, pair, run_ranks, split_with_values

Dims = Mapping[str, int]
SHAPE = re.compile(r"(?<![\w)\]])\[([^\[\]]*)\]")
ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)
RANKS = 2


def section(function: Callable[..., Any], title: str) -> str:
    """The text below `Args:` or `Returns:`, up to the next empty line."""
    text = inspect.getdoc(function) or ""
    return text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]


def entries(function: Callable[..., Any]) -> dict[str, str]:
    _, *parts = ENTRY.split(section(function, "Args"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def lengths(dim: str, dims: Dims) -> set[int]:
    """The lengths that a dim may have: `keys or 1`, `sequence / cp`."""
    found = set()
    for choice in dim.split(" or "):
        length, *divisors = [
            int(name) if name.isdigit() else dims[name]
            for name in map(str.strip, choice.split("/"))
        ]
        for divisor in divisors:
            assert length % divisor == 0
            length //= divisor
        found.add(length)
    return found


def has_shape(tensor: Tensor, shape: str, dims: Dims) -> bool:
    """Whether a tensor has the dims of a shape; `...` are any."""
    before, ellipsis, after = shape.partition("...")
    first = [dim.strip() for dim in before.split(",") if dim.strip()]
    last = [dim.strip() for dim in after.split(",") if dim.strip()]
    missing = tensor.dim() - len(first) - len(last)
    if missing < 0 or (missing and not ellipsis):
        return False
    sizes = [*tensor.shape[: len(first)], *tensor.shape[tensor.dim() - len(last) :]]
    return all(size in lengths(dim, dims) for size, dim in zip(sizes, [*first, *last], strict=True))


def fits(tensor: Tensor, text: str, dims: Dims, given: Mapping[str, Any]) -> bool:
    """Whether a tensor is as an entry says, in brackets or by the name of another argument."""
    if other := re.search(r"the shape of `(\w+)`", text):
        return bool(tensor.shape == given[other[1]].shape)
    if "scalar" in text:
        return tensor.dim() == 0
    shapes = SHAPE.findall(text)
    assert shapes, f"no shape in: {text}"
    return any(has_shape(tensor, shape, dims) for shape in shapes)


def checked(function: Callable[..., Any], dims: Dims, *args: Any, **kwargs: Any) -> None:
    """Call a function; its tensors must be as its docstring says."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    known = entries(function)
    for name, value in given.items():
        if isinstance(value, Tensor):
            assert fits(value, known[name], dims, given), f"{name} {value.shape}: {known[name]}"
    result = function(*args, **kwargs)
    text = section(function, "Returns")
    for tensor in result if isinstance(result, tuple) else (result,):
        assert fits(tensor, text, dims, given), f"result {tensor.shape}: {text}"


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def test_a_wrong_shape_is_seen() -> None:
    def double(x: Tensor) -> Tensor:
        """Twice a tensor.

        Args:
            x: [rows, columns / ranks].

        Returns:
            [columns, rows].
        """
        return torch.cat([x, x], 1)

    dims = {"rows": 3, "columns": 10, "ranks": 2}
    with pytest.raises(AssertionError, match=r"x torch.Size\(\[3, 10\]\)"):
        checked(double, dims, zeros(3, 10))
    with pytest.raises(AssertionError, match=r"result torch.Size\(\[3, 10\]\)"):
        checked(double, dims, zeros(3, 5))


def test_tensor_parallel_functions() -> None:
    def rank(world: World) -> None:
        tp = world.axis("tp")
        context = ForwardContext(ActivationLayout(features=tp))
        dims = {"in": 8, "out": 12, "size": RANKS, "features": 22, "vocabulary": 34}
        checked(column_row.column, dims, zeros(3, 5, 8), zeros(6, 8), zeros(6), context)
        whole = column_row.RowReduction(tp, INVARIANT)
        checked(column_row.row, dims, zeros(3, 5, 4), zeros(12, 4), zeros(12), context, whole)
        checked(normalise, dims, zeros(3, 5, 11), tp, 1e-5, centered=True)
        targets = torch.zeros(3, 5, dtype=torch.long)
        checked(cross_entropy, dims, zeros(3, 5, 17), targets, tp, -100)
        checked(mask_like, {"samples": 3}, zeros(3, 5, 11), 0.5, context)
        for target, s in ((INVARIANT, 1), (Sharded(1), RANKS)):
            table = EmbeddingRule((tp,), (), total=tp, target=target)
            sizes = {"batch": 3, "sequence": 10, "v": RANKS, "f": 1, "s": s}
            tokens = torch.zeros(3, 10, dtype=torch.long)
            checked(look_up, {**dims, **sizes}, tokens, zeros(17, 22), table)
        dims = {"batch": 3, "heads": 8, "kv_heads": 4, "sequence": 5, "head_size": 7, "size": RANKS}
        q, k = zeros(3, 4, 5, 7), zeros(3, 2, 5, 7)
        documents = torch.zeros(3, 5, dtype=torch.long)
        checked(AttentionWithDropout(0.5, context).forward, dims, q, k, k, documents)

    threaded(RANKS, rank, plan=Mesh(tp=RANKS))


@pytest.mark.parametrize(
    ("plan", "parts"), [("tp2", (1, 2)), ("tp4:2d", (2, 2)), ("tp8:3d", (2, 2))]
)
def test_a_parallel_linear(plan: str, parts: tuple[int, int]) -> None:
    def rank(world: World) -> None:
        model: Any = pair(Sizes(16, 3, 24, 40, 24), bias=True)
        split = split_with_values(world, model, ROLES, plan)
        assert isinstance(model.up, layers.ParallelLinear)
        share = split.share(zeros(16, 3, 24), zeros(16), 16)
        split.enter(share.num_rows)
        dims = {"in": 24, "out": 40, "i": parts[0], "o": parts[1]}
        checked(model.up.forward, dims, share.inputs)
        checked(model.up.forward, dims, share.inputs[..., : 24 // parts[0]])

    run_ranks(plan, rank)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_context_parallel_attention(strategy: str) -> None:
    dims = {"batch": 3, "heads": 4, "kv_heads": 2, "sequence": 20, "cp": RANKS, "head_size": 7}

    def rank(world: World) -> None:
        group = ContextGroup(world.axis("cp"), strategy)
        documents = group.cut(torch.zeros(3, 20, dtype=torch.long))
        q, k = zeros(3, 4, 10, 7), zeros(3, 2, 10, 7)
        core: nn.Module = UlyssesAttention(group, CausalAttention())
        if strategy == "ring":
            core = RingAttention(group)
            checked(ring_attention, dims, q, k, k, group, group.whole(documents))
        checked(core.forward, dims, q, k, k, documents)
        sizes = {**dims, "value_size": 6}
        checked(shared_attention, sizes, group, q, k, zeros(3, 2, 10, 6), enable_gqa=True)

    threaded(RANKS, rank, plan=Mesh(cp=RANKS))


def test_attention_to_one_block() -> None:
    dims = {"batch": 3, "heads": 4, "queries": 5, "keys": 6, "head_size": 7}
    mask = torch.ones(1, 4, 1, 6, dtype=torch.bool)
    checked(attend, dims, zeros(3, 4, 5, 7), zeros(3, 4, 6, 7), zeros(3, 4, 6, 7), causal=False)
    checked(
        attend, dims, zeros(3, 4, 5, 7), zeros(3, 4, 6, 7), zeros(3, 4, 6, 7),
        causal=False, mask=mask,
    )  # fmt: skip
