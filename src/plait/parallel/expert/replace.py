"""Move experts between two steps, by the load that has been seen since the last time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.errors import PlanError
from plait.models.experts import MixtureOfExperts
from plait.parallel.expert.dispatch import ExpertExchange
from plait.parallel.expert.placement import ExpertPlacement, in_order, place
from plait.parallel.expert.shadow import ShadowedExperts


@dataclass(frozen=True)
class Placing:
    """How experts are moved.

    Attributes:
        every: steps between two times; 0 for never.
        spare_slots: of each rank, beside as many as it has experts: for copies of the busiest.
        gain: a new placement must make the busiest rank less busy by this share of the mean.
            Otherwise none moves.
    """

    every: int = 0
    spare_slots: int = 0
    gain: float = 0.05


def put(layer: MixtureOfExperts, placement: ExpertPlacement) -> None:
    """Have a split layer compute as `placement` says, from the next forward on.

    Every rank of the axis calls it alike.

    Raises:
        PlanError: the experts are not split.
    """
    exchange = layer.exchange
    if not isinstance(exchange, ExpertExchange):
        raise PlanError(
            "the experts of this layer are not split over ranks; there is nothing to place"
        )
    axis = exchange.groups.whole
    at_home = placement == in_order(placement.num_experts, axis.size)
    new_placement = None if at_home else placement
    exchange.place(new_placement)
    layer.experts.spread_by(None if at_home else ShadowedExperts(axis, placement))


class Placer:
    """The placements of all mixtures of a model, by the name of their routers.

    `layers`: the mixtures of this rank.
    """

    def __init__(
        self,
        layers: Mapping[str, MixtureOfExperts],
        num_ranks: int,
        num_nodes: int,
        placing: Placing,
    ) -> None:
        self._layers = layers
        self._num_ranks = num_ranks
        self._num_nodes = num_nodes
        self._placing = placing
        self._seen: dict[str, list[float]] = {}
        self._num_steps = 0
        self.placements: dict[str, ExpertPlacement] = {}

    @property
    def moves(self) -> bool:
        """Whether experts are moved between steps at all."""
        return bool(self._placing.every) and self._num_ranks > 1

    def after_step(self, loads: Mapping[str, Sequence[float]]) -> None:
        """`loads` of every router [E], of the step that has just ended, over all ranks and alike on
        all of them.
        """
        if not self.moves:
            return
        for name, load in loads.items():
            seen = self._seen.get(name)
            self._seen[name] = (
                list(load) if seen is None else [a + b for a, b in zip(seen, load, strict=True)]
            )
        self._num_steps += 1
        if self._num_steps % self._placing.every == 0:
            for name, seen in self._seen.items():
                self._place(name, seen)
            self._seen = {}

    def rank_loads(self, name: str, load: Sequence[float]) -> list[float]:
        """The tokens of one layer that each rank of the expert axis computes, from `load` [E] of
        all experts.
        """
        return self._layout(name, len(load)).rank_loads(load)

    def _layout(self, name: str, num_experts: int) -> ExpertPlacement:
        return self.placements.get(name) or in_order(num_experts, self._num_ranks)

    def _place(self, name: str, load: Sequence[float]) -> None:
        layer = self._layers[name]
        old = self._layout(name, len(load))
        settings = layer.router.settings
        groups = (
            settings.num_groups
            if settings.num_groups > 1 and settings.num_groups % self._num_nodes == 0
            else None
        )
        nodes = self._num_nodes if (groups or len(load)) % self._num_nodes == 0 else 1
        slots = len(load) + self._placing.spare_slots * self._num_ranks
        new = place(load, self._num_ranks, num_slots=slots, num_nodes=nodes, num_groups=groups)
        if new.imbalance(load) < old.imbalance(load) - self._placing.gain:
            self.placements[name] = new
            put(layer, new)
