"""A table of roles that is wrong is found out, and the message names the module: by its sizes, or
by its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait import models
from plait.errors import ModelError
from plait.plan import Plan
from plait.verify.diagnosis.outputs import locate
from plait.verify.problem import Problem
from plait.verify.run import VerifyTask, in_world
from tests.parity.verify_problems import MODELS, train

Run = Callable[..., list[Any]]
Changes = dict[str, str | None]


def task_with(model: str, plan: str, changes: Changes, probe: str = "sgd") -> VerifyTask:
    """A problem whose table differs from the model's own."""
    keys = {**MODELS[model], "vocab_size": 32, "intermediate_size": 32}
    base = Problem(keys, {"name": "random", "seq_len": 8}, train())
    roles = {**models.roles_for(base.make_model()), **changes}
    table = {pattern: role for pattern, role in roles.items() if role is not None}
    return VerifyTask(
        replace(base, model={**keys, "roles": table}),
        f"{plan} precision:float64",
        1,
        None,
        (probe,),
    )


def report_of(world: Any, task: VerifyTask) -> Any:
    try:
        return in_world(world, task)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize(
    ("model", "changes", "words", "probe"),
    [
        (
            "gpt",
            {"blocks.*.attention.o": "replicated"},
            "'blocks.0.attention.o' (replicated) gets",
            "sgd",
        ),
        (
            "gpt",
            {"blocks.*.mlp.up": "row", "blocks.*.mlp.down": "column"},
            "'blocks.0.mlp.up' (row), 'blocks.0.mlp.down' (column)",
            "sgd",
        ),
        ("gpt", {"head": "column"}, "'head' (column) leaves", "sgd"),
        (
            "gpt",
            {"head": "replicated"},
            "'embed' (embedding) and 'head' (replicated) share a weight",
            "tied",
        ),
        (
            "llama",
            {"blocks.*.mlp.gate": "replicated"},
            "'blocks.0.mlp.gate' (replicated), 'blocks.0.mlp.up' (column)",
            "sgd",
        ),
    ],
)
def test_sizes_that_do_not_fit_name_the_module(
    ranks: Run, model: str, changes: Changes, words: str, probe: str
) -> None:
    found = ranks(2, report_of, task_with(model, "tp2", changes, probe), plan="tp2")
    assert isinstance(found[0], str) and words in found[0], found[0]
    assert "under tp2" in found[0] or "role" in found[0]


@pytest.mark.parametrize(
    ("plan", "changes", "probe", "names"),
    [
        ("tp2:1d,sp", {"position": "replicated"}, "sgd", {"position"}),
        (
            "tp2",
            {"blocks.*.attention.core": None},
            "dropout",
            {"blocks.0.attention.core", "blocks.0.attention.o"},
        ),
    ],
)
def test_outputs_that_differ_name_the_module(
    ranks: Run, plan: str, changes: Changes, probe: str, names: set[str]
) -> None:
    report = ranks(2, report_of, task_with("gpt", plan, changes, probe), plan=plan)[0]
    assert not report.ok
    finding = next(one for one in report.all_findings if one.cause == "role")
    assert names <= set(finding.names), finding.text


def test_a_right_table_has_no_finding_of_this_kind(ranks: Run) -> None:
    """A difference with another cause is not blamed on a role."""
    task = task_with("gpt", "tp2", {})
    assert ranks(2, _located, task, plan="tp2") == [None, None]


def _located(world: Any, task: VerifyTask) -> Any:
    return locate(world, task.problem, Plan.parse(task.plan))
