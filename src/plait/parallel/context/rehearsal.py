"""Which modules of a trunk mix positions, and how: found by running the forward without values.

The wraps that will run are put on, over a group that only knows lengths. The model runs on the meta
device, with a length of the sequence that nothing else in it has. So every operation that mixes
positions is seen (`mixing`). The innermost module around it then gets whole sequences,
and the rehearsal begins again until nothing mixes any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.errors import ModelError, PlanError
from plait.parallel.context.doors import Doors
from plait.parallel.context.handing import noted
from plait.parallel.context.lengths import (
    RANKS,
    SAMPLES,
    LengthsOnly,
    inputs_like,
    parts_unlike,
    short_lengths,
    unlike_sizes,
)
from plait.parallel.context.mixing import draws, mixes
from plait.parallel.context.scans import Carrier, Dims, adopt, handing
from plait.parallel.context.shared import Interception
from plait.parallel.context.trunk import Trunk, WholeForm, cut_at_head, install
from plait.parallel.context.untraced import calls_with_autograd, refuse_untraced
from plait.regions import dissolved
from plait.torch_internals import no_dispatch_modes
from plait.values import PyTree

ROUNDS = 24
PER_TOKEN = "computes_tokens_alone"

Run = Callable[[Callable[[PyTree], PyTree]], object]


@dataclass
class _Found:
    """Modules that one rehearsal has met, and why each mixes positions or draws numbers."""

    attention: set[str] = field(default_factory=set)
    scans: dict[str, Dims] = field(default_factory=dict)
    mixing: dict[str, str] = field(default_factory=dict)
    drawing: dict[str, str] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)


class _Watch(TorchDispatchMode):
    """Notes the modules whose operations mix positions, and answers what has no value here."""

    def __init__(self, stack: list[str], found: _Found, lengths: set[int]) -> None:
        super().__init__()
        self._stack = stack
        self._found = found
        self._lengths = lengths

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        """Numbers that are read from tensors without values are taken to be one, or true."""
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense" and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        if self._lengths and draws(name, args):
            self._found.drawing.setdefault(self._stack[-1], name)
        result = func(*args, **kwargs)
        if not self._lengths:
            tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self._found.sizes.update(size for tensor in tensors for size in tensor.shape)
        if mixes(func, args, kwargs, result, self._lengths):
            self._found.mixing.setdefault(self._stack[-1], name)
        return result


def rehearse(model: nn.Module, blocks: Sequence[str], run: Run, strategy: str, size: int) -> Trunk:
    """The forms of all modules, found without communication.

    Args:
        model: gets inputs [batch, sequence, ...] without values.
        blocks: those of all lists: the trunk is the list with the most parameters among those that
            the forward calls.
        run: calls the model on inputs that its argument makes of an example, with parameters
            without values.
        strategy: `ring` or `ulysses`.
        size: the number of cp ranks.

    Raises:
        ModelError: no cut is found.
        PlanError: an attention that parts of a sequence cannot make, as with dropout.
    """
    try:
        with calls_with_autograd(model, blocks) as traced:
            stage, calls = _first_that_runs(model, run, strategy, size)
    except ModelError as why:
        return _between_doors(model, blocks, run, strategy, size, why=why)
    trunk = _trunk_of(model, blocks, calls)
    refuse_untraced(model, [name for name in trunk.blocks if name in {*blocks} - traced], size)
    return _settled(model, stage, trunk, size)


def _between_doors(
    model: nn.Module, blocks: Sequence[str], run: Run, strategy: str, size: int, *, why: ModelError
) -> Trunk:
    """The trunk of a model whose inputs are no sequences, as pictures are.

    Its sequences begin at the door of the first block, and are gathered behind the last. `why`
    tells what is wrong with the inputs; it is raised where no list of blocks will do.
    """
    doors = Doors(model, blocks)
    sizes: set[int] = set()
    with doors.watched(), suppress(ModelError):
        whole = LengthsOnly(strategy, 0, 0, size, closed=True)
        _Stage(model, whole, run, set()).calls(sizes)
    reason = ""
    for names, length in doors.lists():
        part = next(iter(parts_unlike(model, sizes | {length})), 0)
        group = LengthsOnly(strategy, part, length, size, closed=True)
        stage = _Stage(model, group, run, {part, SAMPLES * part})
        trunk = Trunk({name: {} for name in names}, (names[-1], ""), WholeForm(), closed=length)
        try:
            _settled(model, stage, trunk, size)
        except ModelError as failure:
            reason = reason or str(failure)
            continue
        if not trunk.blocks.keys() <= trunk.whole.keys():
            return trunk
        reason = reason or f"each of {names[0]} .. needs all {length} positions; no part is shared"
    reason = reason or "no list of its blocks gets and gives hidden states [B, positions, width]"
    raise ModelError(f"{reason}; and {why}")


def _settled(model: nn.Module, stage: _Stage, trunk: Trunk, size: int) -> Trunk:
    """The trunk, once a rehearsal of it meets nothing more that mixes positions."""
    adopt(model.modules())
    for _ in range(ROUNDS):
        trunk.forget()
        outcome = stage.play(trunk)
        _refuse_drawing(model, outcome.drawing, size)
        known = set(trunk.attention), dict(trunk.scans)
        trunk.attention |= {name for name in outcome.attention if not _inside(name, trunk.whole)}
        trunk.scans |= _outside(trunk.whole, outcome.scans)
        if not outcome.mixing and (trunk.attention, trunk.scans) == known:
            return trunk
        for name, why in outcome.mixing.items():
            _give_whole(model, trunk, name, why)
    raise ModelError(
        f"cp{size} found no way to cut the sequences of a {type(model).__name__} in {ROUNDS} "
        "attempts; leave cp out"
    )


def _refuse_drawing(model: nn.Module, drawing: dict[str, str], size: int) -> None:
    for name, operation in drawing.items():
        kind = type(model.get_submodule(name)).__name__
        raise ModelError(
            f"'{name}' ({kind}) draws random numbers ({operation}), which would differ on parts of "
            f"a sequence; cp{size} needs a model without: set its dropout or noise to 0"
        )


def _trunk_of(model: nn.Module, blocks: Sequence[str], calls: Sequence[str]) -> Trunk:
    lists: dict[str, list[str]] = {}
    for name in blocks:
        if name in calls:
            lists.setdefault(name.rpartition(".")[0], []).append(name)

    def num_parameters(names: list[str]) -> int:
        return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())

    names = max(lists.values(), key=num_parameters, default=_called_again(model, calls))
    if not names:
        raise ModelError(
            "context parallelism cuts sequences inside the repeated blocks of a model, and a "
            f"{type(model).__name__} calls none; name them as blocks = 'layers.*', or leave cp out"
        )
    last_block = max(names, key=lambda name: max(i for i, call in enumerate(calls) if call == name))
    leaves = [name for name in calls if not any(True for _ in model.get_submodule(name).children())]
    outside = [name for name in leaves if not _inside(name, names)] or leaves
    return Trunk({name: {} for name in names}, (last_block, outside[-1]))


def _called_again(model: nn.Module, calls: Sequence[str]) -> list[str]:
    """The outermost modules of several parts that the forward calls more than once."""
    again: list[str] = []
    for name, count in Counter(calls).items():
        has_parts = any(True for _ in model.get_submodule(name).children())
        if name and count > 1 and has_parts and not _inside(name, again):
            again.append(name)
    return again


def _first_that_runs(
    model: nn.Module, run: Run, strategy: str, size: int
) -> tuple[_Stage, list[str]]:
    """The rehearsal of a length that the model takes, and its calls: some take no long sequence."""
    failures = []
    usual = [(part, RANKS * part) for part in unlike_sizes(model)]
    for part, whole in (*usual, *short_lengths(model)):
        group = LengthsOnly(strategy, part, whole, size)
        stage = _Stage(model, group, run, {part, SAMPLES * part})
        try:
            return stage, stage.calls()
        except ModelError as failure:
            failures.append(failure)
    raise failures[0]


class _Stage:
    """Where a model is rehearsed: without values, or on the host where values decide."""

    def __init__(self, model: nn.Module, group: LengthsOnly, run: Run, lengths: set[int]) -> None:
        self._model = model
        self._group = group
        self._run = run
        self._lengths = lengths
        self._device = "meta"

    def calls(self, sizes: set[int] | None = None) -> list[str]:
        """The names of the modules in the order in which they are called, on whole sequences.

        `sizes` gets those of all tensors that are made.
        A forward that reads values runs on the host, all of whose parameters are zero.
        """
        for device in ("meta", "cpu"):
            self._device = device
            calls: list[str] = []
            found = _Found(sizes=set() if sizes is None else sizes)
            with named_calls(self._model, [""], calls), torch.enable_grad():
                try:
                    with _Watch([""], found, set()):
                        self._call()
                except Exception as failure:
                    reason = f"{type(failure).__name__}: {failure}"
                else:
                    return calls
        raise ModelError(
            f"a {type(self._model).__name__} does not run where the second dim of its inputs, "
            f"which cp cuts as a sequence, is {self._group.seq_len} ({reason}); leave cp out"
        )

    def play(self, trunk: Trunk) -> _Found:
        """One rehearsal; a module that fails counts as one that mixes."""
        outcome = _Found()
        stack = [""]

        def attend(*args: PyTree, **kwargs: PyTree) -> Tensor:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(self._group.is_part(x, -2) for x in tensors[:2]):
                outcome.attention.add(stack[-1])
            return self._group.attend(*args, **kwargs)

        def carry(learned: Dims, carrier: Carrier, args: PyTree, kwargs: PyTree) -> PyTree:
            dims = carrier.sequences(carrier.bound(args, kwargs), self._group)
            if not dims:
                return carrier.function(*args, **kwargs)
            known = outcome.scans.setdefault(stack[-1], {})
            known.update({noted(carrier, name): dim for name, dim in dims.items()})
            with no_dispatch_modes():
                return carrier.function(*args, **kwargs)

        undo = install(self._model, trunk, self._group, attend, carry)
        cut_at_head(self._model, trunk, self._group)
        try:
            watch = _Watch(stack, outcome, self._lengths)
            shared = Interception(attend), handing(partial(carry, {}))
            with named_calls(self._model, stack), torch.no_grad(), shared[0], shared[1], watch:
                result = self._call()
        except PlanError:
            raise
        except Exception as failure:
            outcome.mixing.setdefault(stack[-1], f"{type(failure).__name__}: {failure}")
        else:
            if why := _uncut(list(_leaves(result)), self._group):
                outcome.mixing.setdefault("", why)
        finally:
            if trunk.cuts_head:
                del self._model.get_submodule(trunk.last[1]).forward
            undo()
        return outcome

    def _call(self) -> PyTree:
        with dissolved():  # torch warns where code recomputes what has no gradients
            length = None if self._group.whole_outputs else self._group.seq_len
            return self._run(partial(inputs_like, length=length, device=self._device))


def _leaves(result: PyTree) -> Iterator[PyTree]:
    """The leaves of an output, and the attributes of a dataclass in it."""
    for leaf in tree_leaves(result):
        yield from _leaves(list(vars(leaf).values())) if is_dataclass(leaf) else (leaf,)


def _uncut(leaves: Sequence[PyTree], group: LengthsOnly) -> str:
    """Why an output is not one of a rank's part; empty where it is."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if group.whole_outputs:
        parts = any(group.length in tensor.shape for tensor in tensors)
        return "one of its outputs is a part" if parts else ""
    if not any(group.is_part(tensor, 1) for tensor in tensors):
        return "its output is no part of a sequence"
    whole = any(group.is_whole(tensor, 1) for tensor in tensors)
    return "one of its outputs has whole sequences, another a part" if whole else ""


def _give_whole(model: nn.Module, trunk: Trunk, name: str, why: str) -> None:
    """Give a module whole sequences; one that cannot have them hands this on to its parent."""
    while name in trunk.whole:
        name = name.rpartition(".")[0]
    if not _inside(name, trunk.blocks):
        if trunk.tail is not None and not trunk.joined:
            trunk.joined = {block: {} for block in trunk.blocks}
            return
        if trunk.tail is not None:
            kind = type(model.get_submodule(name)).__name__
            where = f"'{name}' ({kind})" if name else f"the forward of {kind}"
            cure = "compute the loss outside of the forward, by loss=, or " * ("target" in why)
            raise ModelError(
                f"{where} mixes the positions of a sequence around {next(iter(trunk.blocks))} .. "
                f"({why}); context parallelism cuts inside the blocks alone; {cure}leave cp out"
            )
        trunk.tail = WholeForm()
        return
    for inner in [other for other in trunk.whole if other.startswith(f"{name}.")]:
        del trunk.whole[inner]
    trunk.whole[name] = WholeForm()
    trunk.attention = {other for other in trunk.attention if not _inside(other, trunk.whole)}
    trunk.scans = _outside(trunk.whole, trunk.scans)


def _outside(whole: PyTree, scans: dict[str, Dims]) -> dict[str, Dims]:
    return {name: dims for name, dims in scans.items() if not _inside(name, whole)}


def _inside(name: str, outer: PyTree) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in outer)


@contextmanager
def named_calls(
    model: nn.Module, stack: list[str], calls: list[str] | None = None
) -> Iterator[None]:
    """`stack` names the modules that run, the innermost last, and `calls` all that have run;
    experts are not computed.
    """
    handles: list[PyTree] = []
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    stubs: list[nn.Module] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(_enter, stack, calls, name)))
        handles.append(module.register_forward_hook(partial(_leave, stack)))
        if _is_experts(module) and "forward" not in vars(module):
            module.forward = _first
            stubs.append(module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in stubs:
            del module.forward
        for module, training in modes:
            module.training = training


def _enter(stack: list[str], calls: list[str] | None, name: str, *_: object) -> None:
    stack.append(name)
    if calls is not None:
        calls.append(name)


def _leave(stack: list[str], *_: object) -> None:
    stack.pop()


def _is_experts(module: nn.Module) -> bool:
    """Whether a module computes each token by itself, whatever its operations look like."""
    packed = {"gate_up_proj", "down_proj"} <= module._parameters.keys()
    return packed or bool(getattr(module, PER_TOKEN, False))


def _first(*args: object, **kwargs: object) -> Tensor:
    """A result like the first argument."""
    return torch.empty_like(
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    )
