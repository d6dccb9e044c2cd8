from __future__ import annotations

import pytest
import torch

from plait.verify import Facts, RankView, judge
from tests.unit.verify.toy import COUNTS, MICRO, RANKS, altered, clone, reference, weighted

FACTS = Facts({"mb": MICRO, "dp": RANKS, "tp": 4}, {"the vocabulary size": 29}, {"dp": [(0, 1)]})
TOTAL = sum(COUNTS.values())


def first_finding(parallel, record, facts=FACTS):
    report = judge(parallel, record, facts)
    assert not report.ok
    return report.findings[0]


def scaled(grads, factor):
    return {name: None if grad is None else grad * factor for name, grad in grads.items()}


@pytest.mark.parametrize(
    ("factor", "axis", "words"),
    [
        (3.0, "mb", "3.0000 times too large: the number of micro-batches"),
        (0.5, "dp", "2.0000 times too small: the number of data ranks"),
        (29.0, "", "the vocabulary size"),
        (8.0, "dp+tp", "the number of data ranks times the number of tensor ranks"),
        (-2.0, "dp", "wrong sign"),
        (1.2345, "", "1.2345 times too large"),
    ],
)
def test_a_factor_is_named(factor, axis, words):
    record = reference()
    finding = first_finding(altered(record, grads=scaled(record.steps[0].grads, factor)), record)
    assert finding.cause == "scale" and finding.axis == axis and words in finding.text


@pytest.mark.parametrize(
    ("weight", "cause", "axis", "words"),
    [
        (lambda p: float(p.micro_batch == 2), "dropped", "mb", "is that of micro-batch 2 only"),
        (lambda p: float(p.micro_batch != 2), "dropped", "mb", "lacks micro-batch 2"),
        (lambda p: float(p.rank == 0), "dropped", "dp", "lacks data rank 1"),
        (lambda p: 1.0 + (p.rank == 1), "doubled", "dp", "data rank 1 count twice"),
        (
            lambda p: 1.0 + (p.rank == 1 and p.micro_batch == 0),
            "doubled",
            "mb",
            "micro-batch 0 of data rank 1",
        ),
        (lambda p: TOTAL / (6 * p.count), "mean-of-means", "dp+mb", "slices"),
        (lambda p: TOTAL / (2 * {0: 6, 1: 11}[p.rank]), "mean-of-means", "dp", "data ranks"),
        (
            lambda p: {0: 0.7, 1: 0.4}[p.rank],
            "factor-by-dp",
            "dp",
            "clipped or divided before the reduction",
        ),
        (
            lambda p: 1.0 if p.micro_batch else 1 / 3,
            "factor-by-mb",
            "mb",
            "the number of micro-batches",
        ),
        (lambda p: 0.3 + 0.1 * p.rank + 0.07 * p.micro_batch, "slices", "data", "count"),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_what_each_slice_counts_is_found(weight, cause, axis, words, clip):
    record = reference(clip)
    step = record.steps[0]
    factor = 1.0 if clip is None else clip / step.grad_norm
    wrong = scaled(weighted(record, 0, weight), factor)
    finding = first_finding(altered(record, grads=wrong), record)
    assert (finding.cause, finding.axis) == (cause, axis), finding
    assert words in finding.text


def rank_gradients(record):
    return {
        rank: weighted(record, 0, lambda p, rank=rank: float(p.rank == rank))
        for rank in range(RANKS)
    }


def test_a_missing_reduction_is_found_from_what_the_ranks_hold():
    record = reference(contributions=True)
    own = rank_gradients(record)
    views = {rank: RankView(own[rank]) for rank in own}
    finding = first_finding(altered(record, grads=own[0], ranks=views), record)
    assert finding.cause == "missing-reduction" and finding.axis == "dp"
    assert "matches after a sum over dp: a reduction is missing" in finding.text


def test_tied_weights_out_of_step():
    record = reference()
    grads = clone(record.steps[0].grads)
    part = {"first.weight": grads["first.weight"] * 0.3}
    other = {"first.weight": grads["first.weight"] * 0.7}
    grads["first.weight"] = part["first.weight"]
    views = {0: RankView(part), 1: RankView(other)}
    finding = first_finding(altered(record, grads=grads, ranks=views), record, Facts({"pp": 2}))
    assert finding.cause == "tied" and finding.axis == "pp" and finding.names == ("first.weight",)


def test_gradients_kept_from_the_step_before():
    record = reference()
    now = record.steps[1].grads
    before = record.steps[0].grads
    both = {name: None if now[name] is None else now[name] + before[name] for name in now}
    assert "not set to zero" in first_finding(altered(record, 1, grads=both), record).text
    assert "step before" in first_finding(altered(record, 1, grads=clone(before)), record).text


def test_norm_and_clipping():
    record = reference(clip=0.05)
    step = record.steps[0]
    doubled = altered(record, grads=scaled(step.grads, 2**-0.5), grad_norm=step.grad_norm * 2**0.5)
    finding = first_finding(doubled, record)
    assert finding.axis == "dp" and "square of the gradient norm" in finding.text
    assert "clipping hides" not in finding.text
    facts = Facts({"dp": 2, "mb": 2})
    hidden = first_finding(altered(record, grad_norm=step.grad_norm * 2), record, facts)
    assert "clipping hides that all gradients were 2.0000 times too large" in hidden.text
    wrong_clip = altered(record, grads=scaled(step.grads, 1.7))
    assert first_finding(wrong_clip, record).cause == "clip"


def test_only_the_reported_loss_is_wrong():
    record = reference()
    finding = first_finding(altered(record, loss=record.steps[0].loss * 3), record)
    assert finding.cause == "loss-report" and finding.axis == "mb"


def test_start():
    record = reference()
    start = {name: torch.randn_like(value) for name, value in record.start.items()}
    finding = first_finding(type(record)(start, altered(record).steps), record)
    assert finding.axis == "init" and "wrong seed" in finding.text
    start = clone(record.start)
    start["first.weight"][3:] = start["first.weight"][:3]
    assert first_finding(type(record)(start, altered(record).steps), record).cause == "init-shards"


def moved(record, step, change):
    """The record with parameters before + change(name, update) after one step."""
    before = record.before(step)
    params = {
        n: before[n] + change(n, value - before[n])
        for n, value in record.steps[step].params.items()
    }
    return altered(record, step, params=params)


def _half_shard(name, update):
    if name == "first.weight":
        update = update.clone()
        update.flatten()[12:] = 0.1
    return update


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (lambda n, u: 2 * u, "updated-twice", "applied twice"),
        (lambda n, u: 0.9 * u, "learning-rate", "0.900000 times"),
        (lambda n, u: 0 * u, "stale", "every parameter is as before"),
        (
            lambda n, u: 0 * u if n.startswith("second") else u,
            "stale",
            "second.bias, second.weight are as before",
        ),
        (lambda n, u: u + 0.01 if n == "idle" else u, "frozen-moved", "idle"),
        (_half_shard, "shard", "first.weight[12:24] of 24"),
    ],
)
def test_updates(change, cause, words):
    record = reference()
    finding = first_finding(moved(record, 0, change), record)
    assert finding.cause == cause and words in finding.text, finding


def test_weight_decay():
    record = reference()
    before = record.start
    finding = first_finding(
        moved(record, 0, lambda n, u: u + (0.005 * before[n] if n == "first.weight" else 0)), record
    )
    assert finding.cause == "weight-decay" and finding.names == ("first.weight",)


def test_the_state_of_the_optimizer():
    record = reference()
    generator = torch.Generator().manual_seed(0)
    wrong = moved(
        record, 1, lambda n, u: u * (1 + torch.rand(u.shape, generator=generator, dtype=u.dtype))
    )
    assert first_finding(wrong, record).cause == "optimizer-state"


def test_a_neighbouring_learning_rate_is_named():
    record = reference()
    rates = Facts(numbers={"learning rate of step 1": record.steps[0].lr * 0.5})
    finding = first_finding(moved(record, 0, lambda n, u: 0.5 * u), record, rates)
    assert "it uses the learning rate of step 1" in finding.text


def test_lost_layers():
    record = reference()
    params = {
        name: value
        for name, value in clone(record.steps[0].params).items()
        if name.startswith("first")
    }
    grads = {
        name: value
        for name, value in clone(record.steps[0].grads).items()
        if name.startswith("first")
    }
    finding = first_finding(altered(record, params=params, grads=grads), record, Facts({"pp": 2}))
    assert finding.cause == "missing-parameters" and finding.axis == "pp"
