"""The check that ranks were started with one plan and one config."""

from __future__ import annotations

import pytest

from plait.comm import World
from plait.comm.simulated import simulate
from plait.config import Config
from plait.errors import ConfigError
from plait.mesh import Mesh
from plait.run.alike import check_alike

MODEL = {"name": "mlp", "in_features": 64, "hidden_size": 4, "num_hidden_layers": 1}
TABLES = {"model": {**MODEL, "out_features": 10}, "data": {"name": "digits"}}


def start(plans: list[str], overrides: list[list[str]]) -> None:
    """The beginning of ranks that were started so."""

    def rank(world: World) -> None:
        check_alike(world, Config.load(TABLES, overrides[world.rank]), plans[world.rank])

    simulate(Mesh(dp=len(plans)), rank)


@pytest.mark.parametrize(
    ("plans", "override", "said"),
    [
        (["dp2", "dp2"], "train.lr=0.5", "rank 1 .* train.lr is 0.5 there and 0.001 on rank 0;"),
        (["dp2", "dp2"], "train.steps=9", "rank 1 .* train.steps is 9 there and "),
        (["dp2", "tp2"], "train.seed=0", "rank 1 .* the plan is tp2 there and dp2 on rank 0;"),
    ],
)
def test_ranks_that_were_started_with_several_configs_do_not_begin(
    plans: list[str], override: str, said: str
) -> None:
    """Two learning rates would train two models, and nobody would see it."""
    with pytest.raises(ConfigError, match=said):
        start(plans, [["train.seed=0"], [override]])


def test_a_machine_may_have_an_interface_of_another_name() -> None:
    start(["dp2", "dp2"], [["cluster.interface=eth0"], ["cluster.interface=eth1"]])
