"""Records of one training step, and of a run of several steps.

A comparison is worth as much as its observations. So an observation owns its tensors (clones, never
views of live parameters). It keeps every rank's own values beside the agreed one. It may keep the
contributions that a gradient is the sum of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.values import JsonMapping
from plait.verify.record.samples import Samples

Tensors = Mapping[str, Tensor]
Gradients = Mapping[str, Tensor | None]
Shards = Sequence[Mapping[str, tuple[int, int]]]


@dataclass(frozen=True)
class RankView:
    """The view of one rank: whole tensors only, by global parameter name.

    `grads` are the gradients that its optimizer saw, `params` its values after the update.
    """

    grads: Gradients = field(default_factory=dict)
    params: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Contribution:
    """The part of the summed loss' gradient that one slice of the batch contributes. Those of a
    step add up to its gradient.

    `rank` is the coordinate on the data axis, `micro_batch` the index within the rank, `count` its
    unmasked tokens or samples.
    """

    rank: int
    micro_batch: int
    count: float
    grads: Gradients


@dataclass(frozen=True)
class Observation:
    """One step: the loss, the gradients as the optimizer saw them (after clipping), the parameters
    after the update.

    `grad_norm` is the global norm before clipping, `lr` the rate that the update used. `buffers`
    are the persistent ones after the step; of those that ranks keep apart, the mean. All tensors
    have their global shape. `shards` says, where gradients are sharded, which flat range [start,
    stop) of each came from which rank. `count` are the unmasked tokens or samples. `stale_grads` is
    what the gradient would be with the weights of one update ago. `samples` are marks of what each
    rank has read. `auxiliary` is the part of the gradients that auxiliary losses have.
    """

    loss: float
    grads: Gradients
    params: Tensors
    grad_norm: float | None = None
    lr: float | None = None
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    contributions: Sequence[Contribution] = ()
    shards: Shards = ()
    count: float | None = None
    stale_grads: Gradients = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    samples: Sequence[Samples] = ()
    auxiliary: Gradients = field(default_factory=dict)

    @classmethod
    def of(cls, source: Observation | JsonMapping) -> Observation:
        """An observation from a mapping with the same keys (`loss`, `grads`, `params`; others
        optional).
        """
        if isinstance(source, Observation):
            return source
        values = dict(source)
        for key in ("loss", "grad_norm", "lr"):
            if isinstance(values.get(key), Tensor):
                values[key] = float(values[key])
        return cls(**values)


@dataclass(frozen=True)
class Record:
    """A run: the parameters it started from (None when unknown) and one observation a step."""

    start: Tensors | None
    steps: Sequence[Observation]

    def before(self, step: int) -> Tensors | None:
        """The parameters that step `step` started from."""
        return self.start if step == 0 else self.steps[step - 1].params


def whole(tensor: Tensor) -> Tensor:
    """A copy of the global value [...] on the host. A DTensor is gathered by a collective: call it
    alike on all its ranks. Errors: `ModelError` for a tensor whose memory has been freed.
    """
    value = tensor.detach()
    if not value.is_meta and value.numel() and not _has_memory(value):
        raise ModelError(
            f"a parameter of shape {tuple(value.shape)} has no memory now: its framework freed it "
            "after the step, as ZeRO-3 does; of a plan of plait's own ask "
            "`plait verify CONFIG --plan PLAN`, which gathers it"
        )
    gather = getattr(value, "full_tensor", None)
    if gather is not None:
        value = gather()
    return value.to("cpu", copy=True)


def _has_memory(value: Tensor) -> bool:
    """Whether a plain tensor has storage; other tensors answer for themselves."""
    return type(value) is not Tensor or value.untyped_storage().nbytes() > 0


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole copies [...] of all parameters by name; shared ones once. Shards of FSDP2 and DTensor
    are gathered.
    """
    return {plain_name(name): whole(parameter) for name, parameter in module.named_parameters()}


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Whole copies [...] of all gradients by name, None where there is none. Shards of FSDP2 and
    DTensor are gathered.
    """
    return {
        plain_name(name): None if p.grad is None else whole(p.grad)
        for name, p in module.named_parameters()
    }


def plain_name(name: str) -> str:
    """The name without what DistributedDataParallel, torch.compile and activation checkpointing put
    before it.
    """
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def merge(views: Iterable[Observation], aliases: Mapping[str, str] | None = None) -> Observation:
    """One observation from those of all ranks (in rank order), each with its own shards. All copies
    are kept as rank views.

    `aliases` names copies of one parameter, as tied weights on two pipeline stages:
    `{"head.weight": "embedding.weight"}`. Two copies on one rank stay apart, as views of their own.
    The loss is the first that a rank knows.
    """
    aliases = aliases or {}
    ranks: dict[int, RankView] = {}
    grads: dict[str, Tensor | None] = {}
    params: dict[str, Tensor] = {}
    known = list(views)
    extra = len(known)
    for rank, view in enumerate(known):
        own_grads = dict(view.grads)
        own_params = dict(view.params)
        for alias, name in aliases.items():
            if alias in own_params and name in own_params:
                ranks[extra] = RankView(
                    _only(own_grads, alias, name), {name: own_params.pop(alias)}
                )
                own_grads.pop(alias, None)
                extra += 1
        own_grads = {aliases.get(name, name): grad for name, grad in own_grads.items()}
        own_params = {aliases.get(name, name): value for name, value in own_params.items()}
        ranks[rank] = RankView(own_grads, own_params)
        for name, grad in own_grads.items():
            if grads.get(name) is None:
                grads[name] = grad
        params = {**own_params, **params}
    losses = [view.loss for view in known if view.loss == view.loss]
    norms = [view.grad_norm for view in known if view.grad_norm is not None]
    return Observation(
        losses[0] if losses else float("nan"),
        grads,
        params,
        norms[0] if norms else None,
        ranks=ranks,
    )


def _only(grads: Gradients, alias: str, name: str) -> dict[str, Tensor | None]:
    return {name: grads[alias]} if alias in grads else {}


def same_memory(first: Tensor, second: Tensor) -> bool:
    """True when the two tensors [...] are one: their elements lie in the same storage at the same
    place.
    """
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.data_ptr() == second.data_ptr()
    )


def non_finite(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """The names of the tensors, of any shape, that hold a NaN or an infinity."""
    return [name for name, value in tensors.items() if value is not None and not _is_finite(value)]


def _is_finite(value: Tensor) -> bool:
    """A finite sum has finite parts, and takes one pass; else each is asked."""
    if value.is_floating_point() and bool(torch.isfinite(value.sum())):
        return True
    return bool(torch.isfinite(value).all())
