"""The placement of experts: copy the hot ones, and pack all so that every rank has equal work.

The greedy steps of DeepSeek's load balancer (EPLB; DeepSeek-V3 technical report, section 3.4). Each
spare slot goes to the expert whose copies are the busiest. Then slots go, the busiest first, to the
least loaded rank with room. With `num_nodes`, packing is hierarchical. Groups of experts are first
packed onto nodes, whole. So tokens which are limited to a group stay inside a node. Pure: from
loads to a placement, alike on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import PlanError


@dataclass(frozen=True)
class ExpertPlacement:
    """`experts[r]`: the expert in each slot of rank r; every rank has as many slots, every expert
    at least one.
    """

    experts: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        """Different experts."""
        return len(self.copies)

    @property
    def copies(self) -> dict[int, int]:
        """How many slots each expert has."""
        found: dict[int, int] = {}
        for rank in self.experts:
            for expert in rank:
                found[expert] = found.get(expert, 0) + 1
        return found

    def rank_loads(self, load: Sequence[float]) -> list[float]:
        """The load of each rank when the copies of an expert share its tokens evenly, from `load`
        of each expert.
        """
        copies = self.copies
        return [sum(load[expert] / copies[expert] for expert in rank) for rank in self.experts]

    def imbalance(self, load: Sequence[float]) -> float:
        """The busiest rank in units of the mean; 1 is balanced."""
        loads = self.rank_loads(load)
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def in_order(num_experts: int, num_ranks: int) -> ExpertPlacement:
    """Contiguous parts: where experts live, and compute unless something else is asked for."""
    each = num_experts // num_ranks
    return ExpertPlacement(
        tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(num_ranks))
    )


def place(
    load: Sequence[float],
    num_ranks: int,
    *,
    num_slots: int | None = None,
    num_nodes: int = 1,
    num_groups: int | None = None,
) -> ExpertPlacement:
    """A placement of experts by their loads (tokens, or any work) over `num_slots` slots.

    With `num_nodes`, the experts of each of `num_groups` (contiguous, equal; None: each for itself)
    stay on one node.

    Raises:
        PlanError: slots that do not divide by the ranks or are fewer than the experts. Also ranks
            or groups that do not divide by the nodes, or experts by the groups.
    """
    num_experts = len(load)
    slots = num_experts if num_slots is None else num_slots
    groups = num_experts if num_groups is None else num_groups
    if slots < num_experts or slots % num_ranks:
        raise PlanError(
            f"{slots} slots for {num_experts} experts on {num_ranks} ranks: "
            f"a multiple of {num_ranks} that holds all"
        )
    if num_ranks % num_nodes or groups % num_nodes or num_experts % groups:
        raise PlanError(
            f"{num_nodes} nodes must divide {num_ranks} ranks and {groups} groups, "
            f"and these {num_experts} experts"
        )
    each = num_experts // groups
    by_group = [sum(load[group * each : (group + 1) * each]) for group in range(groups)]
    ranks: list[tuple[int, ...]] = []
    for of_node in _near_home(_pack(range(groups), by_group, num_nodes)):
        experts: list[int] = []
        for group in of_node:
            experts += range(group * each, (group + 1) * each)
        copies = _replicate(experts, load, slots // num_nodes)
        filled = [expert for expert in experts for _ in range(copies[expert])]
        shares = [
            load[expert] / copies[expert] if expert in copies else 0.0
            for expert in range(num_experts)
        ]
        ranks += [
            tuple(sorted(part))
            for part in _near_home(_pack(filled, shares, num_ranks // num_nodes))
        ]
    return ExpertPlacement(tuple(ranks))


def _replicate(experts: Sequence[int], load: Sequence[float], num_slots: int) -> dict[int, int]:
    """Copies of each expert: one, and each spare slot to the expert whose copies have most to
    do.
    """
    copies = dict.fromkeys(experts, 1)
    for _ in range(num_slots - len(experts)):
        busiest = max(experts, key=lambda expert: (load[expert] / copies[expert], -expert))
        copies[busiest] += 1
    return copies


def _pack(items: Sequence[int], load: Sequence[float], num_bins: int) -> list[list[int]]:
    """Bins of equally many items: the busiest item first, each to the least loaded bin that has
    room.
    """
    room = len(items) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [0.0] * num_bins
    for item in sorted(items, key=lambda item: (-load[item], item)):
        best = min(
            (index for index in range(num_bins) if len(bins[index]) < room),
            key=lambda index: (totals[index], index),
        )
        bins[best].append(item)
        totals[best] += load[item]
    return bins


def _near_home(bins: list[list[int]]) -> list[list[int]]:
    """Bins in the order that leaves most items at home.

    Homes are equal, contiguous parts of all items in order. Ranks are alike, so a bin may go to any
    of them; an item at home need not travel.
    """
    known = sorted({item for content in bins for item in content})
    home = {item: index * len(bins) // len(known) for index, item in enumerate(known)}

    def num_at_home(content: list[int], rank: int) -> int:
        return len({item for item in content if home[item] == rank})

    # Greedy: the pair of a rank and a bin with most items at home comes first.
    pairs = sorted(
        (-num_at_home(content, rank), rank, index)
        for index, content in enumerate(bins)
        for rank in range(len(bins))
    )
    bin_of_rank: dict[int, int] = {}
    for _, rank, index in pairs:
        if rank not in bin_of_rank and index not in bin_of_rank.values():
            bin_of_rank[rank] = index
    return [bins[bin_of_rank[rank]] for rank in range(len(bins))]
