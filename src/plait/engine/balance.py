"""The routers of a rank's model during a step: what they must be told, and what they have to say.

Before the first forward all ranks agree on what the loss will be divided by and on the samples of
every micro-batch, as the auxiliary losses are weighed by both; after the update the load of every
expert is summed, for balancing by bias and for whoever watches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossFunction
from plait.errors import ModelError
from plait.models.experts import MixtureOfExperts, mixtures
from plait.models.routing import Router
from plait.parallel.expert import Choice, Placer, RankRouterContext, SequenceCut, product
from plait.products import Products


@dataclass(frozen=True)
class Load:
    """Where the tokens of one step went, over all ranks.

    Attributes:
        names: of the routers.
        by_layer: [L][E], tokens of each expert, as chosen.
        by_rank: tokens that each rank of the expert axis computes, all layers together.
        dropped: share of all (token, expert) pairs that found no room.
        busiest: tokens of the busiest expert in units of the mean, in the worst layer; 1 is
        balanced. products: the grouped products that this rank has just chosen by measurement, by
        router.
    """

    names: tuple[str, ...]
    by_layer: tuple[tuple[float, ...], ...]
    by_rank: tuple[float, ...]
    dropped: float
    busiest: float
    products: Mapping[str, Choice] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As `metrics.jsonl` has it."""
        layers = [[round(number) for number in layer] for layer in self.by_layer]
        told = {
            "busiest": self.busiest,
            "dropped": self.dropped,
            "ranks": [round(n) for n in self.by_rank],
            "layers": layers,
        }
        chosen = {name: choice.as_dict() for name, choice in self.products.items()}
        return {**told, "grouped_product": chosen} if chosen else told

    def text(self) -> str:
        """`busiest expert 1.32 x the mean, 0.4 % dropped`."""
        dropped = f", {100 * self.dropped:.1f} % dropped" if self.dropped else ""
        return f"busiest expert {self.busiest:.2f} x the mean{dropped}"


class Balance:
    """All routers of a model, as one."""

    def __init__(
        self,
        routers: dict[str, Router],
        router_context: RankRouterContext,
        tokens: Axis,
        loss: LossFunction,
    ) -> None:
        self.routers = routers
        self._router_context = router_context
        self._tokens = tokens
        self._count = getattr(loss, "count", None)
        self.placer: Placer | None = None  # where experts are split over ranks
        self.load: Load | None = None
        self._to_measure: dict[str, MixtureOfExperts] = {}

    @classmethod
    def of(
        cls, model: nn.Module, tokens: Axis, sequence: SequenceCut | None, loss: LossFunction
    ) -> Balance | None:
        """None for a model without routers."""
        routers = {
            name: module for name, module in model.named_modules() if isinstance(module, Router)
        }
        if not routers:
            return None
        context = RankRouterContext(tokens, sequence)
        for router in routers.values():
            router.context = context
        return cls(routers, context, tokens, loss)

    def use_product(self, model: nn.Module, how: str, products: Products) -> None:
        """How to choose the grouped product of the experts: by rule, by measurement after the first
        step, or this one.
        """
        layers = mixtures(model)
        for layer in layers.values():
            layer.experts.products = products
        product.fix(list(layers.values()), how)
        self._to_measure = layers if how == product.MEASURE else {}

    def begin(self, micro_batches: Sequence[MicroBatch], loss_scale: float = 1.0) -> None:
        """A step begins, whose gradients are those of `loss_scale` times the loss. Collective."""
        samples = torch.tensor(
            [float(micro.num_samples) for micro in micro_batches], dtype=torch.float64
        )
        count = (
            samples.sum()
            if self._count is None
            else sum(self._counted(micro) for micro in micro_batches)
        )
        scalars = torch.cat((torch.as_tensor(count, dtype=torch.float64).reshape(1).cpu(), samples))
        scalars = scalars.to(self._device())
        self._tokens.all_reduce(scalars, control=True).wait()
        total, *by_micro_batch = scalars.tolist()
        self._router_context.begin_step(total, by_micro_batch, loss_scale)

    def _device(self) -> torch.device:
        return next(iter(self.routers.values())).weight.device

    def _counted(self, micro: MicroBatch) -> Tensor:
        assert self._count is not None
        return torch.as_tensor(
            self._count(micro.targets) if micro.num_samples else 0.0, dtype=torch.float64
        )

    def enter(self, index: int, micro: MicroBatch, *, recording: bool) -> None:
        """The forward or backward of a micro-batch begins."""
        self._router_context.enter(index, present=micro.num_samples > 0, recording=recording)

    def check(self, loss: Any) -> None:
        """Refuse a loss whose count could not be known beforehand."""
        if self._count is None and isinstance(loss, tuple) and self._has_auxiliary():
            raise ModelError(
                "the loss returns (sum, count), and auxiliary losses are weighed by the count before the first forward; give "
                "the function an attribute `count`, a function of the targets"
            )

    def _has_auxiliary(self) -> bool:
        return any(
            router.settings.balance_coef or router.settings.z_coef
            for router in self.routers.values()
        )

    def take_auxiliary(self) -> Tensor:
        """This rank's part of the auxiliary losses since the last call, as a sum."""
        return self._router_context.take_auxiliary()

    def after_update(self, stages: Axis) -> None:
        """Sum the load over all ranks, and let the routers of this rank's stages act on it.
        Collective.
        """
        found = [router.load for router in self.routers.values()]
        sizes = [router.settings.num_experts + 2 for router in self.routers.values()]
        device = self._device()
        parts = [
            torch.zeros(size, dtype=torch.float64, device=device) if load is None else load
            for load, size in zip(found, sizes, strict=True)
        ]
        together = torch.cat(parts)
        self._tokens.all_reduce(together, control=True).wait()
        for router, own, load in zip(
            self.routers.values(), found, together.split(sizes), strict=True
        ):
            if own is not None:
                router.load = load
                router.after_update()
        stages.all_reduce(together, control=True).wait()
        loads = dict(
            zip(self.routers, (load.tolist() for load in together.split(sizes)), strict=True)
        )
        self.load = replace(_load(loads, self.placer), products=self._measure(found))
        if self.placer is not None:
            self.placer.after_step({name: load[:-2] for name, load in loads.items()})

    def _measure(self, found: Sequence[Tensor | None]) -> dict[str, Choice]:
        """Choose the products of the layers here, once, on as many rows as each expert had in a
        mean micro-batch.
        """
        layers = self._to_measure
        self._to_measure = {}
        forwards = self._tokens.size * self._router_context.num_micro_batches
        return {
            name: product.choose(layers[name], [float(tokens) / forwards for tokens in load[:-2]])
            for name, load in zip(self.routers, found, strict=True)
            if load is not None and name in layers
        }


def _load(loads: Mapping[str, Sequence[float]], placer: Placer | None) -> Load:
    """`loads` [E + 2] of each router: tokens by expert, dropped pairs, all pairs."""
    chosen = {name: tuple(load[:-2]) for name, load in loads.items()}
    pairs = sum(load[-1] for load in loads.values())
    busiest = max(
        (max(layer) * len(layer) / sum(layer) for layer in chosen.values() if sum(layer)),
        default=1.0,
    )
    parts = [
        [sum(layer)] if placer is None else placer.rank_loads(name, layer)
        for name, layer in chosen.items()
    ]
    return Load(
        names=tuple(chosen),
        by_layer=tuple(chosen.values()),
        by_rank=tuple(sum(ranks) for ranks in zip(*parts, strict=True)),
        dropped=sum(load[-2] for load in loads.values()) / max(pairs, 1.0),
        busiest=busiest,
    )
