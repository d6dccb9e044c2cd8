"""Put context parallelism into a model: by its table of roles, or into its trunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from plait.comm import Axis
from plait.errors import ModelError, PlanError
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.handing import Handing
from plait.parallel.context.rehearsal import Run, rehearse
from plait.parallel.context.ring import RingAttention
from plait.parallel.context.shared import shared_attention
from plait.parallel.context.trunk import cut_at_head, install
from plait.parallel.context.ulysses import UlyssesAttention
from plait.values import PyTree


def apply(model: nn.Module, roles: Mapping[str, str], axis: Axis, strategy: str) -> ContextGroup:
    """Replace the attention modules of a model that gets parts of sequences, in place.

    Args:
        model: takes this rank's tokens [batch, sequence / cp], as `ContextGroup.cut` cuts them, and
            calls its attention with [batch, heads, sequence / cp, head_size].
        roles: the role of each module that has one, by name; `attention` and `position` count.
        axis: the cp ranks.
        strategy: `ring` or `ulysses`.

    Returns:
        The group, which cuts batches.

    Raises:
        ModelError: a model without attention, or with dropout, which ranks would draw differently.
        PlanError: an unknown strategy.
    """
    group = ContextGroup(axis, strategy)
    attention = [name for name, role in roles.items() if role == "attention"]
    if not attention:
        raise ModelError(
            f"cp{axis.size} needs modules of role attention, and this model names none; "
            "leave cp out"
        )
    _refuse_dropout(model, axis.size)
    for name in attention:
        parent_name, _, key = name.rpartition(".")
        core = model.get_submodule(name)
        if strategy not in ("ring", "ulysses"):
            raise PlanError(
                f"there is no context strategy {strategy!r}; there are ring and ulysses"
            )
        split = RingAttention(group) if strategy == "ring" else UlyssesAttention(group, core)
        setattr(model.get_submodule(parent_name), key, split)
    for name, role in roles.items():
        if role == "position":
            model.get_submodule(name).register_forward_pre_hook(
                _tell_positions(group), with_kwargs=True
            )
    return group


def apply_to_trunk(
    model: nn.Module,
    blocks: Sequence[str],
    axis: Axis,
    strategy: str,
    run: Run,
    *,
    in_stages: bool = False,
) -> ContextGroup:
    """Have the repeated blocks of any model hold parts of the sequence; wraps forwards in place.

    Args:
        model: takes whole inputs [batch, sequence, ...], and gives outputs [batch, sequence / cp,
            ...] from then on. One of pictures gives the outputs of one device.
        blocks: names of the repeated blocks, in which activations are [batch, sequence / cp, ...].
        axis: the cp ranks.
        strategy: `ring` or `ulysses`.
        run: calls the model, whose parameters have no values then; see `rehearse`.
        in_stages: the model is one of a pipeline, so all pictures have the size of the example.

    Returns:
        The group, which cuts targets alone.

    Raises:
        ModelError: a model without blocks, or with dropout, which ranks would draw differently.
    """
    _refuse_dropout(model, axis.size)
    trunk = rehearse(model, blocks, run, strategy, axis.size)
    group = ContextGroup(
        axis, strategy, whole_inputs=True, inside=trunk.closed, one_length=in_stages
    )
    install(model, trunk, group, partial(shared_attention, group), Handing(group))
    group.cut_head_by(partial(cut_at_head, model, trunk, group))
    return group


def _tell_positions(group: ContextGroup) -> Callable[..., PyTree]:
    def hook(
        module: nn.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        if kwargs.get("positions") is not None:  # of packed documents, cut with the batch
            return args, kwargs
        return args, {**kwargs, "positions": group.positions().to(args[0].device)}

    return hook


def _refuse_dropout(model: nn.Module, size: int) -> None:
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0)
        rate = getattr(module, "attention_dropout", rate) if rate == 0.0 else rate
        if isinstance(rate, float) and rate > 0:
            raise ModelError(
                f"'{name}' has dropout {rate:g}, which would differ on parts of a sequence; "
                f"cp{size} needs dropout 0"
            )
