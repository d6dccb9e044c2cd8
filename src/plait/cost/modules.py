"""The description of any torch module: run once on the meta device, where nothing is computed and nothing allocated.

Blocks are the children of the largest list of modules. Each kind of block runs once more under watch (`watching`). Where
roles are known (`ROLES` beside the class, or given), they say how a tensor axis splits a block, hence its messages and which
of the saved numbers it divides. What stands outside of blocks and of layers is not seen.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from plait.cost.operations import Block, Elementwise, Model, Saved
from plait.cost.watching import Watch, is_layer
from plait.errors import ModelError

SAMPLES = 2
"""Of the run on the meta device; some layers refuse a single one."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def describe_by_running(module: Any, seq_len: int, roles: Mapping[str, str] | None = None, *, example: Any = None) -> Model:
    """The description of a torch module from its forward on samples of `seq_len` tokens (1: without a sequence).

    `example`: what it takes, a batch of `SAMPLES`; without one, what its first layer may take.
    Raises `ModelError` when it runs with no input that its first layer takes.
    """
    import torch

    table = roles if roles is not None else getattr(sys.modules.get(type(module).__module__), "ROLES", {})
    by_module = {id(child): role for name, child in module.named_modules() if (role := _role(name, table))}
    blocks = repeated(module)
    within = {id(part) for block in blocks for part in block.modules()}
    units = [*blocks, *(layer for layer in module.modules() if is_layer(layer) and id(layer) not in within)]
    own = {id(block) for block in blocks}
    with torch.device("meta"):
        met = _first_run(module, _inputs(module, seq_len) if example is None else [example], units)
        known: dict[str, Block] = {}
        described = [(id(unit) in own, _known(known, unit, call, SAMPLES * seq_len, by_module)) for unit, call in met]
    return _assembled(module, described, seq_len)


def repeated(module: Any) -> list[Any]:
    """The blocks of a module: the children of its largest list."""
    lists = [c for c in module.modules() if type(c).__name__ in {"ModuleList", "Sequential"} and len(c) > 1]
    best = max(lists, key=lambda child: sum(p.numel() for p in child.parameters()), default=None)
    return [] if best is None else list(best)


def _role(name: str, table: Mapping[str, str]) -> str | None:
    fits = (role for pattern, role in table.items() if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name))
    return next(fits, None)


def _first_run(module: Any, candidates: Iterable[Any], units: list[Any]) -> list[tuple[Any, Call]]:
    """Each block and each layer outside of blocks with what it was called with, in order."""
    import torch

    met: list[tuple[Any, Call]] = []

    def remember(unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        met.append((unit, (args, kwargs)))

    state = {name: tensor.to("meta") for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    failure: Exception | None = None
    for candidate in candidates:
        args, kwargs = ((), dict(candidate)) if isinstance(candidate, Mapping) else ((candidate,), {})
        handles = [unit.register_forward_pre_hook(remember, with_kwargs=True) for unit in units]
        try:
            torch.func.functional_call(module, state, args, kwargs)
        except Exception as error:  # whatever its code raises; another input may fit
            failure = failure or error
            met.clear()
        else:
            return met
        finally:
            for handle in handles:
                handle.remove()
    raise ModelError(f"{type(module).__name__} runs with no input that its first layer takes: {failure}")


def _inputs(module: Any, seq_len: int) -> Iterator[Any]:
    """What may go in, by the first layer with a weight: tokens, images, features with and without a sequence."""
    import torch

    first = next((layer for layer in module.modules() if is_layer(layer)), None)
    if first is None:
        return
    kind, shape = type(first).__name__, first.weight.shape
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


def _known(known: dict[str, Block], unit: Any, call: Call, tokens: int, roles: Mapping[int, str]) -> Block:
    """The block of a unit; equal ones, called alike, are watched once."""
    args, kwargs = call
    shapes = [tuple(x.shape) if hasattr(x, "shape") else x for x in (*args, *kwargs.values())]
    named = [roles.get(id(part), "") for part in unit.modules()]
    sizes = [tuple(p.shape) for p in unit.parameters()]
    key = repr((unit, shapes, named, sizes, not known))
    if key not in known:
        known[key] = _watched(unit, call, float(tokens), roles, first_of_all=not known)
    return known[key]


def _watched(unit: Any, call: Call, tokens: float, roles: Mapping[int, str], *, first_of_all: bool) -> Block:
    """`first_of_all`: what goes in is data, which wants no gradient."""
    import torch

    def fresh(x: Any) -> Any:  # as the output of the block before: it needs a gradient where it can have one
        return x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x

    args, kwargs = tuple(map(fresh, call[0])), {name: fresh(x) for name, x in call[1].items()}
    if first_of_all:
        args, kwargs = call
    watch = Watch(tokens, roles)
    out = watch.run(unit, args, kwargs)
    rest = sum(p.numel() for p in unit.parameters()) - watch.counted
    others = (Elementwise("parameters", 0.0, 0.0, "none", rest),) if rest > 0 else ()
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), out)
    width = first.numel() if first.is_floating_point() else getattr(out, "numel", first.numel)()
    saved = Saved(
        sequence=watch.saved.get("none", 0.0) / tokens,
        tensor=watch.saved.get("heads", 0.0) / tokens,
        sequence_masks=watch.saved.get("masks", 0.0) / tokens,
        gathered=watch.gathered / tokens,
    )
    return Block(type(unit).__name__, (*watch.operations, *watch.elementwise(), *others), saved, max(1, round(width / tokens)))


def _assembled(module: Any, described: list[tuple[bool, Block]], seq_len: int) -> Model:
    """What comes before the first block is the embedding, what comes after the last one is the head."""
    places = [index for index, (is_block, _) in enumerate(described) if is_block]
    start, end = (places[0], places[-1] + 1) if places else (0, len(described))
    inner = [block for _, block in described[start:end]]
    before, after = ([block for _, block in part] for part in (described[:start], described[end:]))
    runs: list[tuple[Block, int]] = [(_joined("embedding", before), 1)] if before else []
    for block in inner:
        if runs and runs[-1][0] is block:
            runs[-1] = (block, runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    runs += [(_joined("head", after), 1)] if after else []
    counted = sum(block.parameters * count for block, count in runs)
    tied = max(0, counted - sum(p.numel() for p in module.parameters()))  # a shared weight is met twice and stored once
    hidden = max((block.width for block, _ in runs), default=1)
    return Model(type(module).__name__, tuple(runs), seq_len=seq_len, tied_parameters=tied, hidden=hidden)


def _joined(name: str, blocks: list[Block]) -> Block:
    operations = tuple(op for block in blocks for op in block.operations)
    kept = {field: sum(getattr(block.saved, field) for block in blocks) for field in ("sequence", "tensor", "sequence_masks")}
    gathered = sum(block.saved.gathered for block in blocks)
    return Block(name, operations, Saved(**kept, gathered=gathered), blocks[-1].width)
