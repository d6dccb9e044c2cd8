"""A model of any kind whose repeated blocks hold parts of the sequence: the trunk.

What stands before the blocks (embeddings, masks, rotary tables) sees whole sequences on every rank.
So positions and masks are those of one device. At the door of each block this rank's positions are
taken. Inside, `scaled_dot_product_attention` is shared by all ranks. Scans and causal convolutions
whose functions are known by their arguments hand their state from rank to rank. A module that mixes
positions in another way gets whole sequences, gathered. It gives back this rank's part. What comes
after the blocks sees each position alone. Code between the blocks may need whole sequences, as
`x + block(x)` does. Blocks then give whole ones back.
All of it is the row S -> R of the table of layouts. Every gradient of a parameter is a partial sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils._pytree import KeyPath, keystr, tree_leaves_with_path, tree_map_with_path

from plait.errors import ModelError
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.scans import Carrier, Dims, HandOn, handing
from plait.parallel.context.shared import Interception
from plait.values import PyTree

STAYS = 99  # the dim of what is not cut: no tensor has it
Wrap = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
Carry = Callable[[Dims, Carrier, PyTree, PyTree], PyTree]


@dataclass
class WholeForm:
    """A module that sees whole sequences.

    Attributes:
        inputs: the dim of the sequence of each tensor that is gathered, by its path.
        outputs: the dim of the sequence of each tensor that is cut.
    """

    inputs: Dims = field(default_factory=dict)
    outputs: Dims = field(default_factory=dict)


@dataclass
class Trunk:
    """How the modules of a model see the sequence, by name.

    Attributes:
        blocks: modules at whose door this rank's positions are taken; the dims of what is cut.
        attention: modules whose calls of `scaled_dot_product_attention` are shared.
        scans: modules whose scans and convolutions are handed on; the dims of their arguments.
        whole: modules that see whole sequences.
        last: the last block and the last module, in the order of their calls.
        tail: only where what comes between those two sees whole sequences. `inputs` are gathered
            behind the block, `outputs` are cut at the door of the module.
        joined: the dims of what each block gives, gathered behind it. Empty but where the code
            between the blocks sees whole sequences.
        closed: the length of sequences that no input has. They begin at the first block and end
            behind the last, as the patches of a picture do. 0 where inputs are sequences.
    """

    blocks: dict[str, Dims]
    last: tuple[str, str]
    tail: WholeForm | None = None
    attention: set[str] = field(default_factory=set)
    scans: dict[str, Dims] = field(default_factory=dict)
    whole: dict[str, WholeForm] = field(default_factory=dict)
    joined: dict[str, Dims] = field(default_factory=dict)
    closed: int = 0

    @property
    def cuts_head(self) -> bool:
        """Whether this rank's positions are taken again at the door of the last module."""
        return self.tail is not None and not self.closed

    def forget(self) -> None:
        """Drop every dim that a rehearsal has found."""
        forms = [*self.whole.values(), *([] if self.tail is None else [self.tail])]
        inputs = (form.inputs for form in forms)
        for dims in (*self.blocks.values(), *self.joined.values(), *inputs):
            dims.clear()
        for form in forms:
            form.outputs.clear()


def install(
    model: nn.Module,
    trunk: Trunk,
    group: ContextGroup,
    attend: Callable[..., Tensor],
    carry: Carry,
) -> Callable[[], None]:
    """Wrap the forwards of the modules of a trunk -> what takes the wraps off again.

    Args:
        model: whose modules `trunk` names.
        trunk: how each of them sees the sequence.
        group: the ranks, and the positions of each.
        attend: answers `scaled_dot_product_attention`, of this rank's queries, keys and values
            [batch, heads, sequence / cp, head_size].
        carry: answers scans and convolutions, of this rank's parts.
    """
    wrapped: list[tuple[nn.Module, Callable[..., PyTree] | None]] = []

    def wrap(name: str, make: Wrap, *, talks: bool = True) -> None:
        module = model.get_submodule(name)
        wrapped.append((module, vars(module).get("forward")))
        module.forward = _wrapped(make, talks, module.forward)

    for name in sorted(trunk.attention):
        wrap(name, functools.partial(_intercepting, attend), talks=False)
    for name, dims in trunk.scans.items():
        wrap(name, functools.partial(_carrying, functools.partial(carry, dims)), talks=False)
    for name, form in trunk.whole.items():
        wrap(name, functools.partial(_gathering, group, form, name))
    for name, dims in trunk.blocks.items():
        wrap(name, functools.partial(_cutting, group, dims))
    for name, dims in trunk.joined.items():
        wrap(name, functools.partial(_gathered, group, dims))
    if trunk.tail is not None and not (trunk.closed and trunk.joined):
        wrap(trunk.last[0], functools.partial(_gathered, group, trunk.tail.inputs))
    return functools.partial(_unwrap, wrapped)


def _wrapped(make: Wrap, talks: bool, forward: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The forward inside a wrapper, which says how to make it again for a copy of the module.

    `talks`: the wrapper communicates, so it stays outside of a compiled block.
    """
    outer = make(forward)
    vars(outer).update(wrapped_by=functools.partial(_wrapped, make, talks), stays_outside=talks)
    return outer


def cut_at_head(model: nn.Module, trunk: Trunk, group: ContextGroup) -> None:
    """Cut at the door of the last module, where sequences came to it whole.

    Layers are split between `install` and this: the head may be another module since.
    """
    if trunk.tail is not None and trunk.cuts_head:
        head = model.get_submodule(trunk.last[1])
        head.forward = _cutting(group, trunk.tail.outputs, head.forward)


def _unwrap(wrapped: Iterable[tuple[nn.Module, Callable[..., PyTree] | None]]) -> None:
    for module, forward in reversed(list(wrapped)):
        del module.forward
        if forward is not None:
            module.forward = forward


def _intercepting(
    attend: Callable[..., Tensor], forward: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    @functools.wraps(forward)
    def intercepting(*args: object, **kwargs: object) -> PyTree:
        with Interception(attend):
            return forward(*args, **kwargs)

    return intercepting


def _carrying(hand_on: HandOn, forward: Callable[..., PyTree]) -> Callable[..., PyTree]:
    @functools.wraps(forward)
    def carrying(*args: object, **kwargs: object) -> PyTree:
        with handing(hand_on):
            return forward(*args, **kwargs)

    return carrying


def _cutting(
    group: ContextGroup, dims: Dims, forward: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    @functools.wraps(forward)
    def cutting(*args: object, **kwargs: object) -> PyTree:
        if group.whole_outputs and not group.learns:
            _measure((args, kwargs), group, dims)
        args, kwargs = cut((args, kwargs), group, dims)
        return forward(*args, **kwargs)

    return cutting


def _gathering(
    group: ContextGroup, form: WholeForm, name: str, forward: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    @functools.wraps(forward)
    def gathering(*args: object, **kwargs: object) -> PyTree:
        args, kwargs = gather((args, kwargs), group, form.inputs)
        outputs = cut(forward(*args, **kwargs), group, form.outputs)
        if set(form.outputs.values()) <= {STAYS}:
            raise ModelError(f"'{name}' gives no tensor with the sequence that it got")
        return outputs

    return gathering


def _gathered(
    group: ContextGroup, dims: Dims, forward: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    @functools.wraps(forward)
    def gathered(*args: object, **kwargs: object) -> PyTree:
        outputs = forward(*args, **kwargs)
        measured = group.whole_outputs and not group.learns
        if measured and not _has_part(outputs, group, dims):
            raise ModelError(
                f"a block has given no part of {group.seq_len} positions, which each rank of "
                f"cp{group.axis.size} has {group.length} of; give all pictures one size"
            )
        return gather(outputs, group, dims)

    return gathered


def _measure(values: PyTree, group: ContextGroup, dims: Dims) -> None:
    """Take the length of the sequences that come whole to a block's door, if they do."""
    for path, leaf in tree_leaves_with_path(values):
        dim = dims.get(keystr(path), STAYS)
        if isinstance(leaf, Tensor) and dim < leaf.dim():
            group.take_length(leaf, dim)
            return


def _has_part(values: PyTree, group: ContextGroup, dims: Dims) -> bool:
    return any(
        isinstance(leaf, Tensor) and group.is_part(leaf, dims.get(keystr(path), STAYS))
        for path, leaf in tree_leaves_with_path(values)
    )


def cut(values: PyTree, group: ContextGroup, dims: Dims) -> PyTree:
    """This rank's positions of all tensors with one dim that is as long as the whole sequence.

    `dims` has that dim, by path: 1 in [batch, sequence, features], which becomes [batch, sequence /
    cp, features]. Tensors of two such dims are masks, and stay whole. No communication;
    differentiable.
    """

    def part(path: KeyPath, leaf: PyTree) -> PyTree:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = _dim_of(leaf, group, group.seq_len, dims, keystr(path))
        return leaf if dim is None else group.take(leaf, dim)

    return tree_map_with_path(part, values)


def gather(values: PyTree, group: ContextGroup, dims: Dims) -> PyTree:
    """All positions of all tensors with one dim that is as long as a rank's part.

    `dims` has that dim, by path: 1 in [batch, sequence / cp, features], which becomes [batch,
    sequence, features]. Collective and differentiable.
    """

    def whole(path: KeyPath, leaf: PyTree) -> PyTree:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = _dim_of(leaf, group, group.length, dims, keystr(path))
        return leaf if dim is None else group.gather(leaf, dim)

    return tree_map_with_path(whole, values)


def _dim_of(leaf: Tensor, group: ContextGroup, length: int, known: Dims, path: str) -> int | None:
    """The dim of a tensor that has this length, by its path.

    Rehearsals learn it. Later a path that no rehearsal has met is taken to have it as dim 1.
    """
    dim = known.get(path, 1)
    if group.learns and path not in known:
        fitting = [dim for dim, size in enumerate(leaf.shape) if size == length]
        if group.whole_outputs and leaf.dim() == 3 and leaf.shape[1] == length:
            fitting = [1]  # as many patches as features
        dim = fitting[0] if len(fitting) == 1 else STAYS
        known[path] = dim
    return dim if dim < leaf.dim() and leaf.shape[dim] == length else None
