"""What mixtures of experts say of themselves: load by expert and rank, what was placed anew, chosen
and sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.errors import PlanError
from plait.models import losses
from plait.parallel.expert import Placing
from tests.parity.families import MIXTRAL
from tests.parity.harness import optimizer

Run = Callable[..., list[Any]]
HIDDEN = MIXTRAL["hidden_size"]
INNER = MIXTRAL["intermediate_size"]
EXPERTS = 8
LAYERS = 2


def steps(world: World, plan: str, options: Options, num_steps: int) -> list[Any]:
    """(load, bytes sent on the expert axis, layouts) of each step."""
    with torch.device("meta"):
        model = models.make(
            "llama", **{**MIXTRAL, "num_local_experts": EXPERTS, "initializer_range": 0.3}
        )
    engine = build(
        model, plan, loss=losses.cross_entropy, optimizer=optimizer, options=options, world=world
    )
    axis = world.axis("dp")
    found = []
    tokens = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(0)).tensor_split(
        axis.size
    )[axis.rank]
    for _ in range(num_steps):
        result = engine.step((tokens[:, :-1], tokens[:, 1:]), trace=False)
        assert (
            result.load is not None
            and engine.balance is not None
            and engine.balance.placer is not None
        )
        found.append(
            (result.load, result.ledger.bytes("ep"), dict(engine.balance.placer.placements))
        )
    return found


def test_copies_of_hot_experts_make_ranks_more_even(ranks: Run) -> None:
    options = Options(placing=Placing(every=1, spare_slots=2, gain=0.0))
    found = ranks(4, steps, "dp4 ep4 precision:float64", options, 3, plan="dp4 ep4")
    alone = ranks(4, steps, "dp4 ep4 precision:float64", Options(), 3, plan="dp4 ep4")[0]

    def uneven(load: Any) -> float:
        return max(load.by_rank) * 4 / sum(load.by_rank)

    for rank in found:
        assert [load for load, _, _ in rank] == [
            load for load, _, _ in found[0]
        ]  # alike on every rank
        assert rank[0][2].keys() == {f"blocks.{layer}.mlp.router" for layer in range(LAYERS)}
        for (load, _, _), (other, _, _) in zip(rank, alone, strict=True):
            assert load.by_layer == other.by_layer and sum(load.by_rank) == pytest.approx(
                sum(other.by_rank)
            )
        assert uneven(rank[-1][0]) < uneven(alone[-1][0]) - 0.1


def test_traffic_of_guests_is_their_weights_forth_and_their_gradients_back(ranks: Run) -> None:
    """Beside the tokens, whose number is known: with every expert on every rank's slots nothing
    else moves but weights.
    """
    options = Options(placing=Placing(every=1, spare_slots=2, gain=0.0))
    found = ranks(4, steps, "dp4 ep4 precision:float64", options, 2, plan="dp4 ep4")
    layouts = found[0][0][2]  # of the second step
    each = EXPERTS // 4
    size = 8
    weights = 3 * HIDDEN * INNER * size
    for rank, row in enumerate(found):
        sent = 0
        for layout in layouts.values():
            for other, slots in enumerate(layout.experts):
                guests = {expert for expert in slots if expert // each != other}
                at_home = {expert for expert in guests if expert // each == rank}
                sent += (
                    len(at_home) * weights if other != rank else len(guests) * weights
                )  # forth; the gradients back
        counts = LAYERS * 3 * (each + 2) * size  # how many rows each slot of the three others gets
        rows = row[1][1] - sent - counts
        assert rows >= 0 and rows % (HIDDEN * size) == 0
        assert (
            rows <= LAYERS * 2 * 8 * 8 * 2 * HIDDEN * size
        )  # each token goes to two experts, there and back, twice


def test_grouped_products_are_measured_once_and_told(ranks: Run) -> None:
    found = ranks(2, steps, "dp2 ep2", Options(grouped_product="measure"), 2, plan="dp2 ep2")
    for (first, _, _), (second, _, _) in found:
        told = first.as_dict()["grouped_product"]
        assert told.keys() == {f"blocks.{layer}.mlp.router" for layer in range(LAYERS)}
        for choice in told.values():
            assert choice["method"] == min(choice["seconds"], key=choice["seconds"].__getitem__)
            assert choice["seconds"].keys() == {"kernel", "loop", "padded"}
        assert "grouped_product" not in second.as_dict()


def test_a_product_that_does_not_take_the_weights_is_refused(ranks: Run) -> None:
    for how, message in (
        ("kernel", "takes no experts of shape"),
        ("lop", "no grouped product 'lop'"),
    ):
        said = ranks(2, refused, how, plan="dp2 ep2")
        assert all(message in text for text in said), said


def refused(world: World, how: str) -> str:
    with pytest.raises(PlanError) as caught:
        steps(world, "dp2 ep2 precision:float64", Options(grouped_product=how), 1)
    return str(caught.value)
