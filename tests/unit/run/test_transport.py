"""`[cluster] transport`: the backend that the ranks of each verb ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from plait.config import Config, load
from plait.errors import ConfigError
from plait.predict.cost.model.tables import assumed
from plait.run import evaluating, job
from plait.verify.drift import DriftTask
from plait.verify.ranks import _rank_main
from plait.verify.run import problem_of

MODEL = {"name": "mlp", "in_features": 2, "hidden_size": 4, "num_hidden_layers": 1}
TABLES: dict[str, Any] = {"model": {**MODEL, "out_features": 2}, "data": {"name": "random"}}


class Asked(Exception):
    """A world was asked for."""


def config_of(transport: str) -> Config:
    return load({**TABLES, "cluster": {"transport": transport}})


def verify(config: Config) -> Any:
    return _rank_main(lambda world, task: None, DriftTask(problem_of(config), "dp1", 1))


VERBS: dict[str, Callable[[Config], Any]] = {
    "train": lambda config: job.run(job.TrainingRun(config, "dp1")),
    "evaluate": lambda config: evaluating.run(evaluating.EvaluateJob(config, "dp1")),
    "verify": verify,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("transport", "backend"), [("auto", "auto"), ("sockets", "gloo")])
def test_ranks_ask_for_the_transport(verb: str, transport: str, backend: str) -> None:
    config = config_of(transport)
    with patch("plait.engine.build.comm.init", side_effect=Asked) as init, pytest.raises(Asked):
        VERBS[verb](config)
    assert init.call_args.kwargs["backend"] == backend


def test_another_word_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"cluster.transport.*'auto'.*'sockets'"):
        config_of("socket")


def test_an_estimate_says_that_sockets_have_no_price() -> None:
    notes = partial(assumed, batch=16, seq_len=1)
    by_sockets = notes({**TABLES, "cluster": {"transport": "sockets"}})
    assert any("transport" in note for note in by_sockets)
    assert not any("transport" in note for note in notes(TABLES))
