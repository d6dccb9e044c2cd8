"""The differential check on other people's parallel steps: torch's Schedule1F1B, DDP and FSDP2,
right ones and wrong ones.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.check_torch_pipelining import check, gather, make_batches, mean_loss, sgd, summed_loss
from torch import Tensor, nn

from plait.verify import (
    Facts,
    Parallel,
    Recipe,
    Report,
    Slice,
    differential,
    gradients_of,
    parameters_of,
    run_reference,
)


def _pipeline(world: Any, options: dict[str, Any]) -> Report:
    return check(**options)


def test_schedule_1f1b_is_right_in_the_control_case(ranks):
    reports = ranks(2, _pipeline, {})
    assert all(report.ok for report in reports), reports[0].text()
    assert reports[0].error("grad") < 1e-12


@pytest.mark.parametrize(
    ("options", "least_error", "cause", "words"),
    [
        (
            {"accumulate": 2},
            0.3,
            "factor-by-mb",
            "0 to 3: 0.2500, 4 to 7: 1.0000 (4.0000 times too small: the number of micro-",
        ),
        (
            {"padded": True},
            0.3,
            "mean-of-means",
            "a mean of means: the micro-batches hold unequal numbers",
        ),
    ],
)
def test_schedule_1f1b_is_caught(ranks, options, least_error, cause, words):
    reports = ranks(2, _pipeline, options)
    assert [report.text() for report in reports] == [reports[0].text()] * 2
    report = reports[0]
    assert not report.ok and report.error("grad") > least_error
    assert (report.findings[0].cause, report.findings[0].axis) == (cause, "mb")
    assert words in report.findings[0].text


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(31, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 31)
    ).double()


def _slices(step: int, batch: tuple[Tensor, Tensor]) -> list[Slice]:
    parts = zip(*(tensor.chunk(dist.get_world_size()) for tensor in batch), strict=True)
    return [Slice(rank, 0, part) for rank, part in enumerate(parts)]


def _wrapped(kind: str) -> nn.Module:
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(_model())
    return nn.parallel.DistributedDataParallel(_model()) if kind == "ddp" else _model()


def _data_parallel(world: Any, kind: str, options: dict[str, Any]) -> Report:
    """Three steps; `kind` none forgets the wrapper, so that gradients are never reduced."""
    batches = make_batches(3, options.get("padded", False))
    truth = run_reference(_model(), batches, Recipe(summed_loss, sgd), _slices, contributions=True)
    model = _wrapped(kind)
    optimizer = sgd(model.parameters())

    def step(number: int) -> dict[str, Any]:
        tokens, targets = _slices(number, batches[number])[dist.get_rank()].batch
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "FSDP2-wrapped module"
            )  # its output is a view, which nobody changes here
            loss = mean_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        grads = gradients_of(model)
        optimizer.step()
        return {"loss": _mean(loss.detach()), "grads": grads, "params": parameters_of(model)}

    about = Parallel(
        Facts({"dp": 2}, lines={"dp": [(0, 1)]}),
        gather,
        start=lambda: parameters_of(model),
        name=kind,
    )
    return differential(
        lambda number: truth.steps[number], step, steps=3, start=truth.start, parallel=about
    )


def _mean(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_is_right_when_every_rank_counts_alike(ranks, kind):
    report = ranks(2, _data_parallel, kind, {})[0]
    assert report.ok, report.text()
    assert report.error("grad") < 1e-12 and report.num_steps == 3


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_mean_per_rank_over_uneven_tokens_is_caught(ranks, kind):
    report = ranks(2, _data_parallel, kind, {"padded": True})[0]
    assert not report.ok
    assert (report.findings[0].cause, report.findings[0].axis) == ("mean-of-means", "dp"), (
        report.text()
    )


def test_a_forgotten_wrapper_is_caught(ranks):
    report = ranks(2, _data_parallel, "none", {})[0]
    found = {finding.cause: finding for finding in report.findings}
    assert (
        found["missing-reduction"].axis == "dp"
        and "mean over dp" in found["missing-reduction"].text
    ), report.text()
    assert "replicas" in found
