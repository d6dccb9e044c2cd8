"""The description of any torch module: run once on the meta device, where nothing is computed and
nothing allocated.

Blocks are the children of the largest list of modules. One without a forward, as a `ModuleDict`,
is met by its children. Each kind of block runs once more under watch (`watching`). Where roles are
known (`ROLES` beside the class, or given), they say how a tensor axis splits a block. Its messages
follow, and which of the saved numbers the axis divides. What stands outside of blocks and of layers
is not seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from plait.errors import ModelError
from plait.patterns import matches
from plait.predict.cost.model.from_leaves import describe_leaves
from plait.predict.cost.model.operations import Block, Elementwise, Model, Saved
from plait.predict.cost.model.watching import OperationWatch, is_layer, tensors_in
from plait.predict.cost.model.with_values import state_of, tokens_for, value_of
from plait.stateless import call_with
from plait.values import PyTree

if TYPE_CHECKING:
    from torch import nn

SAMPLES = 2
"""Samples of the run on the meta device; some layers refuse a single one."""

Call = tuple[tuple[object, ...], dict[str, object]]


def describe_by_running(
    module: nn.Module,
    seq_len: int,
    roles: Mapping[str, str] | None = None,
    *,
    example: PyTree = None,
) -> Model:
    """The description of a torch module from its forward on samples of `seq_len` tokens (1: without
    a sequence).

    `example`: what it takes, a batch of `SAMPLES`; without one, what its first layer may take. A
    block whose forward depends on values cannot run on the meta device. It is run with values on a
    few tokens, or described by its layers. Raises `ModelError` when the module runs with no input
    that its first layer takes.
    """
    import torch

    table = (
        roles
        if roles is not None
        else getattr(sys.modules.get(type(module).__module__), "ROLES", {})
    )
    by_module = {
        id(child): role for name, child in module.named_modules() if (role := _role(name, table))
    }
    blocks = repeated(module)
    within = {id(part) for block in blocks for part in block.modules()}
    owners = {id(part): block for block in blocks for part in _called(block)}
    units = [
        *(part for block in blocks for part in _called(block)),
        *(layer for layer in module.modules() if is_layer(layer) and id(layer) not in within),
    ]
    known = dict[str, Block]()
    try:
        with torch.device("meta"):
            given = _inputs(module, seq_len) if example is None else iter([example])
            met = _first_run(module, given, units, set(owners))
            tokens = SAMPLES * seq_len
            found = [(unit, _known(known, unit, call, tokens, by_module)) for unit, call in met]
    except ModelError:
        few = min(seq_len, tokens_for(module) // SAMPLES)
        if not few:
            raise
        known.clear()
        with torch.device("meta"):
            inputs = list(_inputs(module, few)) if example is None else [example]
        met = _first_run(module, inputs, units, set(), real=True)
        tokens = SAMPLES * (few if example is None else seq_len)
        found = [
            (unit, _known(known, unit, call, tokens, by_module, real=True)) for unit, call in met
        ]
    return _assembled(module, _whole_blocks(found, owners), seq_len)


def repeated(module: Any) -> list[nn.Module]:
    """The blocks of a module: the children of its largest list."""
    lists = [
        c
        for c in module.modules()
        if type(c).__name__ in {"ModuleList", "Sequential"} and len(c) > 1
    ]
    best = max(lists, key=lambda child: sum(p.numel() for p in child.parameters()), default=None)
    return [] if best is None else list(best)


def _called(block: nn.Module) -> Iterator[nn.Module]:
    """The block; where it has no forward, those of its children that a model may call."""
    from torch import nn

    if type(block).forward is not nn.Module.forward or "forward" in vars(block):
        yield block
        return
    for child in block.children():
        yield from _called(child)


def _whole_blocks(
    found: Iterable[tuple[nn.Module, Block]], owners: Mapping[int, nn.Module]
) -> list[tuple[bool, Block]]:
    """Whether each is of a repeated block. The parts of one that follow each other are one."""
    described: list[tuple[bool, Block]] = []
    joined = dict[tuple[int, ...], Block]()
    for owner, group in groupby(found, lambda one: owners.get(id(one[0]))):
        units, blocks = zip(*group, strict=True)
        if owner is None or owner in units:
            described += [(owner is not None, block) for block in blocks]
            continue
        key = tuple(map(id, blocks))
        if key not in joined:
            joined[key] = _joined(type(owner).__name__, list(blocks))
        described.append((True, joined[key]))
    return described


def _role(name: str, table: Mapping[str, str]) -> str | None:
    fits = (role for pattern, role in table.items() if matches(pattern, name))
    return next(fits, None)


def _first_run(
    module: nn.Module,
    candidates: Iterable[nn.Module],
    units: list[nn.Module],
    blocks: set[int],
    *,
    real: bool = False,
) -> list[tuple[nn.Module, Call]]:
    """Each block and each layer outside of blocks with what it was called with, in order. One of
    the `blocks` that fails is taken to give back something like what it was given.
    """
    import torch

    met: list[tuple[nn.Module, Call]] = []

    def remember(unit: nn.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        met.append((unit, (args, kwargs)))

    state = state_of(module, real=real)
    failure: Exception | None = None
    for candidate in candidates:
        given = torch.utils._pytree.tree_map(value_of, candidate) if real else candidate
        args, kwargs = arguments_of(given)
        handles = [unit.register_forward_pre_hook(remember, with_kwargs=True) for unit in units]
        try:
            with _lenient([unit for unit in units if id(unit) in blocks]):
                call_with(module, state, args, kwargs)
        except Exception as error:  # whatever its code raises; another input may fit
            failure = failure or error
            met.clear()
        else:
            return met
        finally:
            for handle in handles:
                handle.remove()
    raise ModelError(
        f"{type(module).__name__} runs with no input that its first layer takes: {failure}"
    )


def arguments_of(inputs: PyTree) -> Call:
    """Positional and named arguments of a forward: a mapping has names, a tuple or list is
    several.
    """
    from plait.batch_trees import is_per_sample

    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list) and not is_per_sample(inputs):
        return tuple(inputs), {}
    return (inputs,), {}


@contextlib.contextmanager
def _lenient(blocks: list[nn.Module]) -> Iterator[None]:
    """While it lasts, a block whose forward needs values returns something like its first input."""
    import torch

    def wrapped(forward: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def run(*args: object, **kwargs: object) -> PyTree:
            try:
                return forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError):
                tensors = [
                    x
                    for x in (*args, *kwargs.values())
                    if isinstance(x, torch.Tensor) and x.is_floating_point()
                ]
                if not tensors:
                    raise
                return torch.empty_like(tensors[0])

        return run

    for block in blocks:
        block.forward = wrapped(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _inputs(module: Any, seq_len: int) -> Iterator[PyTree]:
    """Inputs that a model may take, by the first layer with a weight. They are tokens, images,
    features with and without a sequence.
    """
    import torch

    first = next((layer for layer in module.modules() if is_layer(layer)), None)
    if first is None:
        return
    kind = type(first).__name__
    shape = first.weight.shape
    if hasattr(first, "num_embeddings"):
        yield torch.zeros(SAMPLES, seq_len, dtype=torch.long)
    elif kind.startswith("Conv"):
        for side in (seq_len, 32, 224) if seq_len > 1 else (32, 224):
            yield torch.zeros(SAMPLES, first.in_channels, *(side,) * (len(shape) - 2))
    else:
        width = getattr(first, "in_features", shape[-1])
        if seq_len > 1:
            yield torch.zeros(SAMPLES, seq_len, width)
        yield torch.zeros(SAMPLES, width)


def _known(
    known: dict[str, Block],
    unit: nn.Module,
    call: Call,
    tokens: int,
    roles: Mapping[int, str],
    *,
    real: bool = False,
) -> Block:
    """The block of a unit; equal ones, called alike, are watched once."""
    args, kwargs = call
    shapes = [tuple(x.shape) if hasattr(x, "shape") else x for x in (*args, *kwargs.values())]
    named = [roles.get(id(part), "") for part in unit.modules()]
    sizes = [tuple(p.shape) for p in unit.parameters()]
    key = repr((unit, shapes, named, sizes, not known))
    if key not in known:
        first = not known
        try:
            known[key] = _watched(unit, call, float(tokens), roles, first_of_all=first, real=real)
        except (NotImplementedError, RuntimeError):  # it needs values
            known[key] = _with_values(unit, call, tokens, roles)
    return known[key]


def _with_values(unit: nn.Module, call: Call, tokens: int, roles: Mapping[int, str]) -> Block:
    """A block that does not run on the meta device, run on a few tokens with values. Where that
    fails, its layers.
    """
    import torch

    length = tokens // SAMPLES
    few = min(length, tokens_for(unit) // SAMPLES)

    def part(x: PyTree) -> PyTree:  # the dim of tokens is cut; a mask has two of them
        if isinstance(x, torch.Tensor) and few < length:
            dims = [
                dim
                for dim in range(x.dim())
                if x.shape[dim] == length and not (dim == 0 and x.dim() > 1)
            ]
            for dim in dims if x.dim() > 3 else dims[:1]:
                x = x.narrow(dim, 0, few)
        return value_of(x)

    if few:
        args = tuple(map(part, call[0]))
        kwargs = {name: part(x) for name, x in call[1].items()}
        try:
            with torch.device("cpu"):
                return _watched(
                    unit, (args, kwargs), float(SAMPLES * few), roles, first_of_all=False, real=True
                )
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            pass
    return describe_leaves(
        type(unit).__name__, [leaf for leaf in unit.modules() if not list(leaf.children())]
    )


def _watched(
    unit: nn.Module,
    call: Call,
    tokens: float,
    roles: Mapping[int, str],
    *,
    first_of_all: bool,
    real: bool = False,
) -> Block:
    """`first_of_all`: what goes in is data, which wants no gradient."""
    import torch

    def fresh(
        x: PyTree,
    ) -> PyTree:  # as the output of the block before: it needs a gradient where it can have one
        return (
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
        )

    args = tuple(map(fresh, call[0]))
    kwargs = {name: fresh(x) for name, x in call[1].items()}
    if first_of_all:
        args, kwargs = call
    watch = OperationWatch(tokens, roles)
    out = watch.run(unit, args, kwargs, real=real)
    rest = sum(p.numel() for p in unit.parameters()) - watch.counted
    others = (Elementwise("parameters", 0.0, 0.0, "none", rest),) if rest > 0 else ()
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    first = next(tensors_in((given, args, kwargs, out)), None)
    width = 0 if first is None else first.numel()
    if first is None or not first.is_floating_point():
        width = getattr(out, "numel", lambda: width)()
    saved = Saved(
        sequence=watch.saved.get("none", 0.0) / tokens,
        tensor=watch.saved.get("heads", 0.0) / tokens,
        sequence_masks=watch.saved.get("masks", 0.0) / tokens,
        gathered=watch.gathered / tokens,
    )
    return Block(
        type(unit).__name__,
        (*watch.operations, *watch.elementwise(), *others),
        saved,
        max(1, round(width / tokens)),
    )


def _assembled(module: nn.Module, described: list[tuple[bool, Block]], seq_len: int) -> Model:
    """Operations before the first block are the embedding, those after the last one the
    head.
    """
    places = [index for index, (is_block, _) in enumerate(described) if is_block]
    start, end = (places[0], places[-1] + 1) if places else (0, len(described))
    inner = [block for _, block in described[start:end]]
    before, after = ([block for _, block in part] for part in (described[:start], described[end:]))
    total = sum(p.numel() for p in module.parameters())
    unseen = total - sum(block.parameters for _, block in described)
    if unseen > 0:  # parameters of the module itself, layers that this input did not meet
        width = described[-1][1].width if described else 1
        after.append(
            Block("unseen", (Elementwise("unseen", 0.0, 0.0, "none", unseen),), Saved(), width)
        )
    runs: list[tuple[Block, int]] = [(_joined("embedding", before), 1)] if before else []
    for block in inner:
        if runs and runs[-1][0] is block:
            runs[-1] = (block, runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    runs += [(_joined("head", after), 1)] if after else []
    counted = sum(block.parameters * count for block, count in runs)
    tied = max(0, counted - total)  # a shared weight is met twice and stored once
    hidden = max((block.width for block, _ in runs), default=1)
    return Model(
        type(module).__name__, tuple(runs), seq_len=seq_len, tied_parameters=tied, hidden=hidden
    )


def _joined(name: str, blocks: list[Block]) -> Block:
    operations = tuple(op for block in blocks for op in block.operations)
    parts = [block.saved for block in blocks]
    saved = Saved(
        sequence=sum(part.sequence for part in parts),
        tensor=sum(part.tensor for part in parts),
        sequence_masks=sum(part.sequence_masks for part in parts),
        gathered=sum(part.gathered for part in parts),
    )
    return Block(name, operations, saved, blocks[-1].width)
