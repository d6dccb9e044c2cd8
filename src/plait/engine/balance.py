"""The routers of a rank's model during a step: their context, and the load that they report.

Before the first forward all ranks agree on the loss's divisor and the samples of every micro-batch.
Auxiliary losses are weighed by both. After the update the load of every expert is summed, for
balancing by bias and for reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.engine.batch import MicroBatch
from plait.engine.expected_count import count_of, counted
from plait.engine.loss import LossFunction, LossSum
from plait.engine.stages.contexts import MicroBatchContext
from plait.errors import ModelError
from plait.models.experts import MixtureOfExperts, mixtures
from plait.models.routing import Router
from plait.parallel.expert import Placer, ProductChoice, RankRouterContext, SequenceCut, product
from plait.products import Products
from plait.torch_internals import numbers_on


@dataclass(frozen=True)
class Load:
    """Where the tokens of one step went, over all ranks.

    Attributes:
        names: of the routers.
        by_layer: [L][E], tokens of each expert, as chosen.
        by_rank: tokens that each rank of the expert axis computes, all layers together.
        dropped: share of all (token, expert) pairs that found no room.
        busiest: tokens of the busiest expert in units of the mean, in the worst layer; 1 is
            balanced.
        products: the grouped products that this rank has just chosen by measurement, by router.
    """

    names: tuple[str, ...]
    by_layer: tuple[tuple[float, ...], ...]
    by_rank: tuple[float, ...]
    dropped: float
    busiest: float
    products: Mapping[str, ProductChoice] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The load as `metrics.jsonl` has it."""
        layers = [[round(number) for number in layer] for layer in self.by_layer]
        record = {
            "busiest": self.busiest,
            "dropped": self.dropped,
            "ranks": [round(n) for n in self.by_rank],
            "layers": layers,
        }
        chosen = {name: choice.as_dict() for name, choice in self.products.items()}
        return {**record, "grouped_product": chosen} if chosen else record

    def text(self) -> str:
        """`busiest expert 1.32 x the mean, 0.4 % dropped`."""
        dropped = f", {100 * self.dropped:.1f} % dropped" if self.dropped else ""
        return f"busiest expert {self.busiest:.2f} x the mean{dropped}"


@dataclass(frozen=True)
class ExpertSettings:
    """Placement of the experts, and how they multiply.

    Attributes:
        placer: moves experts between steps; None where experts are not split over ranks.
        grouped_product: `rule`, `measure` (after the first step), or the name of a method.
        products: the matrix products of the experts.
    """

    placer: Placer | None
    grouped_product: str
    products: Products


class Balance(MicroBatchContext):
    """All routers of a model, as one.

    Attributes:
        routers: the routers by name.
        placer: moves experts between steps; None where experts are not split over ranks.
        load: tokens of every expert in the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: tuple[Axis, Axis],
        sequence: SequenceCut | None,
        loss: LossFunction,
        settings: ExpertSettings,
    ) -> None:
        """Take over the routers of a model.

        `axes` are the ranks with other tokens, and the stages of the pipeline. `sequence` is how
        the positions of a sequence are cut over ranks.
        """
        self.routers = routers_of(model)
        self._tokens, self._stages = axes
        self._router_context = RankRouterContext(self._tokens, sequence)
        for router in self.routers.values():
            router.route_in(self._router_context)
        self._count = count_of(loss)
        self.placer = settings.placer
        self.load: Load | None = None
        layers = mixtures(model)
        for layer in layers.values():
            layer.experts.multiply_with(settings.products)
        product.fix(list(layers.values()), settings.grouped_product)
        measures = settings.grouped_product == product.MEASURE
        self._to_measure: dict[str, MixtureOfExperts] = layers if measures else {}

    def begin_step(self, micro_batches: Sequence[MicroBatch], loss_divisor: float | Tensor) -> None:
        samples = [float(micro.num_samples) for micro in micro_batches]
        scalars = numbers_on(self._device(), [0.0, *samples], torch.float64)
        scalars[0] += sum(counted(micro, self._count) for micro in micro_batches)
        self._tokens.all_reduce(scalars, control=True).wait()
        self._router_context.begin_step(scalars[0], scalars[1:], loss_divisor)

    def _device(self) -> torch.device:
        return next(iter(self.routers.values())).weight.device

    def enter(self, index: int, micro_batch: MicroBatch, stage: int, *, recording: bool) -> None:
        self._router_context.enter(index, present=micro_batch.num_samples > 0, recording=recording)

    def after_forward(self, losses: LossSum, loss: object) -> None:
        """Add this rank's part of the auxiliary losses.

        Raises ModelError for a loss whose count could not be known beforehand.
        """
        auxiliary = self._router_context.take_auxiliary()
        if auxiliary is not None:
            losses.add_auxiliary(auxiliary)
        if self._count is None and isinstance(loss, tuple) and self._has_auxiliary():
            raise ModelError(
                "the loss returns (sum, count), and auxiliary losses are weighed by the count "
                "before the first forward; give the function an attribute `count`, a function of "
                "the targets"
            )

    def _has_auxiliary(self) -> bool:
        return any(
            router.settings.balance_coef or router.settings.z_coef
            for router in self.routers.values()
        )

    @property
    def needs_host(self) -> bool:
        """Whether the host acts on the load of this step: it moves experts, or measures them."""
        moves = self.placer is not None and self.placer.moves
        return moves or bool(self._to_measure)

    def after_update(self) -> None:
        """Sum the load over all ranks, and act on it. Collective."""
        found = [router.load for router in self.routers.values()]
        loads = self._by_router(self.sum_loads().tolist())
        self.load = replace(_load(loads, self.placer), products=self._measure(found))
        if self.placer is not None:
            self.placer.after_step({name: load[:-2] for name, load in loads.items()})

    def sum_loads(self) -> Tensor:
        """The loads of all routers one after the other, [numbers] summed over all ranks.

        The routers of this rank's stages balance by them. The host reads nothing. Collective.
        """
        found = [router.load for router in self.routers.values()]
        device = self._device()
        parts = [
            torch.zeros(size, dtype=torch.float64, device=device) if load is None else load
            for load, size in zip(found, self._load_sizes, strict=True)
        ]
        together = torch.cat(parts)
        self._tokens.all_reduce(together, control=True).wait()
        for router, own, load in zip(
            self.routers.values(), found, together.split(self._load_sizes), strict=True
        ):
            if own is not None:
                router.balance(load)
        self._stages.all_reduce(together, control=True).wait()
        return together

    def load_of(self, values: Sequence[float]) -> Load:
        """The load that the numbers of `sum_loads` tell."""
        return _load(self._by_router(values), self.placer)

    def take_load(self, values: Sequence[float]) -> Load:
        """Take the load that the numbers of `sum_loads` tell as that of the last step."""
        self.load = self.load_of(values)
        return self.load

    @property
    def _load_sizes(self) -> list[int]:
        return [router.settings.num_experts + 2 for router in self.routers.values()]

    def _by_router(self, values: Sequence[float]) -> dict[str, Sequence[float]]:
        ends = list(accumulate(self._load_sizes, initial=0))
        return {
            name: values[start:end]
            for name, (start, end) in zip(self.routers, pairwise(ends), strict=True)
        }

    def _measure(self, found: Sequence[Tensor | None]) -> dict[str, ProductChoice]:
        """Choose the products of the layers here, once, on as many rows as each expert had in a
        mean micro-batch.
        """
        layers = self._to_measure
        self._to_measure = {}
        forwards = self._tokens.size * self._router_context.num_micro_batches
        choices = {}
        for name, load in zip(self.routers, found, strict=True):
            if load is not None and name in layers:
                mean_rows = [float(tokens) / forwards for tokens in load[:-2]]
                choices[name] = product.choose(layers[name], mean_rows)
        return choices


def has_routers(model: nn.Module) -> bool:
    """Whether a model has experts to choose from."""
    return bool(routers_of(model))


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers of a model, by name; none in a dense one."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


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
