"""`verify` on real ranks: every probe of every family passes, and says what it could not test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.plan import Plan
from plait.verify import Report, run
from plait.verify.probes import PROBES
from plait.verify.run import VerifyTask, in_world, verify
from tests.parity.verify_problems import MODELS, problem


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


@pytest.mark.parametrize(
    "plan",
    [
        "dp1",
        pytest.param("dp2 mb2", marks=pytest.mark.long),
        pytest.param("dp2:ring", marks=pytest.mark.long),
        pytest.param("dp2:server", marks=pytest.mark.long),
        "dp4:zero1 mb2",
        pytest.param("dp2:zero2 mb2", marks=pytest.mark.long),
        pytest.param("dp2:zero3", marks=pytest.mark.long),
        "dp4:zero3,replicate2",
    ],
)
def test_every_probe_passes(ranks, plan):
    task = VerifyTask(problem("gpt"), f"{plan} precision:float64", 3, None, tuple(PROBES))
    reports = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)
    assert all(report.ok for report in reports), reports[0].text()
    assert reports[0].text() == reports[-1].text()
    assert {part.title for part in reports[0].parts} == set(PROBES)


def prove(ranks, plan, *probes, model=None):
    model = {**MODELS["gpt"], "vocab_size": 32} if model is None else model
    even = replace(problem("gpt"), model=model, data={"name": "random", "seq_len": 8})
    task = VerifyTask(even, f"{plan} precision:float64", 2, None, probes)
    report = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)[0]
    assert report.ok, report.text()
    return {part.title for part in report.parts}


def test_every_probe_passes_under_a_tensor_axis(ranks):
    assert prove(ranks, "tp2:1d,sp", *PROBES) == set(PROBES)


def test_a_context_axis_leaves_dropout_out(ranks):
    assert prove(ranks, "cp2", *PROBES) == set(PROBES) - {"dropout"}


@pytest.mark.parametrize("plan", ["pp2:zb-h1 tp4:2d mb4", "tp4:2d mb4 remat:full"])
def test_what_fills_a_micro_batch_up_draws_no_random_numbers(ranks, plan):
    """Three samples a micro-batch, on two rows of the grid."""
    assert prove(ranks, plan, "sgd", "dropout") == {"sgd", "dropout"}


def test_a_library_model_that_drops_is_cut_into_stages_and_grids(ranks):
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 4,
        "vocab_size": 32,
        "n_positions": 16,
    }
    config |= {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    assert prove(ranks, "pp2 tp4:2d mb4", "sgd", model={"name": "hf", "config": config}) == {"sgd"}


@pytest.mark.parametrize("model", ["mlp", "llama", "resnet", "fno"])
def test_every_family_passes(ranks, model):
    task = VerifyTask(problem(model), "dp2:zero3 mb2 precision:float64", 3, None, tuple(PROBES))
    report = ranks(2, run_task, task, plan="dp2")[0]
    assert report.ok, report.text()
    skipped = {note.split()[1] for note in report.notes}
    assert {part.title for part in report.parts} == set(PROBES) - skipped and len(report.parts) >= 7


def test_batch_norm_is_compared_slice_by_slice_and_said_so(ranks):
    task = VerifyTask(
        problem("batch-norm", global_batch=32),
        "dp2:zero1 mb2 precision:float64",
        3,
        None,
        ("sgd", "adamw", "clipping"),
    )
    report = ranks(2, run_task, task, plan="dp2")[0]
    assert report.ok, report.text()
    assert all("batch-norm" in part.notes[0] for part in report.parts)


@pytest.mark.parametrize("plan", ["dp2 mb2", "pp2 mb2", "dp2:zero3 mb3"])
def test_running_statistics_are_compared(ranks, plan):
    task = VerifyTask(
        problem("batch-norm", global_batch=32),
        f"{plan} precision:float64",
        2,
        None,
        ("sgd", "last-batch"),
    )
    report = ranks(2, run_task, task, plan=plan)[0]
    assert report.ok, report.text()
    names = {one.name for part in report.parts for one in part.differences if one.kind == "buffer"}
    assert any(name.endswith("running_var") for name in names)
    assert any(name.endswith("num_batches_tracked") for name in names)


def run_with_statistics_moved_twice(world: Any, task: VerifyTask) -> Report:
    """Every batch norm moves its statistics twice a forward, as under a careless recomputation."""
    original = nn.BatchNorm2d.forward

    def twice(self: Any, x: Any) -> Any:
        with torch.no_grad():
            original(self, x)
        return original(self, x)

    step = Engine.step

    def stepped(self: Any, *args: Any, **keys: Any) -> Any:
        with patch.object(nn.BatchNorm2d, "forward", twice):
            return step(self, *args, **keys)

    with patch.object(Engine, "step", stepped):
        return in_world(world, task)


def test_statistics_that_move_twice_are_named(ranks):
    task = VerifyTask(
        problem("batch-norm", global_batch=32), "dp2 precision:float64", 2, None, ("sgd",)
    )
    found = ranks(2, run_with_statistics_moved_twice, task, plan="dp2")[0].as_dict()
    assert not found["ok"]
    assert found["worst"]["kind"] == "buffer"
    assert found["worst"]["name"].endswith(("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.parametrize("steps", [3, 8])
def test_training_that_magnifies_rounding_is_called_so(ranks, steps: int):
    """Statistics of three values a channel, and a high rate: every step is a thousand times as far
    off. Perturbation says what passes, until one device is no guide to itself.
    """
    task = VerifyTask(problem("batch-norm"), "dp2 mb2 precision:float64", steps, None, ("sgd",))
    report = ranks(2, run_task, task, plan="dp2")[0]
    assert "this training is ill-conditioned" in report.text()
    if steps == 3:
        assert report.ok, report.text()
        assert report.as_dict()["grad_error"] > report.tolerance
        first = [one for one in report.parts[0].differences if one.step == 0]
        assert all(report.parts[0].limit_of(one) <= 1e-8 for one in first), "step 0 is exact"
    else:
        assert not report.ok, report.text()
        assert report.all_findings[0].cause == "rounding", report.text()


def test_a_fault_under_ill_conditioned_training_is_seen(ranks):
    task = VerifyTask(problem("batch-norm"), "dp2 mb2 precision:float64", 3, None, ("sgd",))
    found = ranks(2, run_with_statistics_moved_twice, task, plan="dp2")[0]
    assert not found.ok
    assert "rounding" not in {one.cause for one in found.all_findings}
    assert found.worst is not None and found.worst.kind == "buffer"


def test_a_loss_in_float32_does_not_make_a_right_plan_wrong(ranks):
    floated = problem("gpt", loss="tests.parity.verify_problems:loss_in_float32")
    task = VerifyTask(floated, "dp2:zero1 mb2 precision:float64", 3, None, ("sgd", "adamw"))
    report = ranks(2, run_task, task, plan="dp2")[0]
    assert report.ok, report.text()
    assert "lower precision" in report.text()
    assert report.as_dict()["loss_error"] > 1e-10


def test_a_balance_loss_and_dropout_go_together(ranks):
    """The balance loss is one of a micro-batch of all ranks, the random numbers are each rank's."""
    model = {
        **MODELS["llama"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.2,
        "router_z_loss_coef": 0.02,
        "dropout": 0.1,
    }
    task = VerifyTask(
        replace(problem("gpt"), model=model), "dp2 mb2 precision:float64", 2, None, ("sgd",)
    )
    report = ranks(2, run_task, task, plan="dp2")[0]
    assert report.ok, report.text()
    assert "random" in report.text()


def test_verify_needs_no_second_run_when_all_is_well(ranks):
    calls = []

    def runner(task: VerifyTask) -> Report:
        calls.append(task.plan)
        return ranks(2, run_task, task, plan="dp2")[0]

    assert verify(VerifyTask(problem("mlp"), "dp2 precision:float64", 2, None, ("sgd",)), runner).ok
    assert len(calls) == 1


CONFIG = {
    "model": {
        "name": "mlp",
        "in_features": 6,
        "hidden_size": 11,
        "num_hidden_layers": 2,
        "out_features": 5,
    },
    "data": {"name": "random"},
    "train": {"global_batch": 12},
}


def test_the_door_starts_ranks_of_its_own():
    report = run(CONFIG, "dp2:zero2 mb2 precision:bf16", probes=["sgd", "tied"])
    found = report.as_dict()
    assert (
        found["ok"]
        and found["plan"] == "dp2:zero2 mb2 precision:float64"
        and found["world_size"] == 2
    )
    assert found["steps"] == 3 and 0 < found["grad_error"] < 1e-12
    assert any("tied does not apply" in note for note in found["notes"])
    assert any("the plan's own precision is bf16" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dtype": "float16"}, "a proof needs"),
        ({"probes": ["sdg"]}, "did you mean 'sgd'"),
        ({"steps": 0}, "at least one step"),
    ],
)
def test_what_cannot_be_asked(keys, words):
    with pytest.raises(PlanError, match=words):
        run(CONFIG, "dp2", **keys)


@pytest.mark.parametrize("plan", ["dp2:local,every4", "dp2:async-server,stale1"])
def test_plans_out_of_step_have_nothing_to_be_proven_equal_to(plan: str) -> None:
    with pytest.raises(PlanError, match="do not step together"):
        run(
            {
                "model": {
                    "name": "mlp",
                    "in_features": 4,
                    "hidden_size": 4,
                    "num_hidden_layers": 1,
                    "out_features": 3,
                }
            },
            plan,
        )
