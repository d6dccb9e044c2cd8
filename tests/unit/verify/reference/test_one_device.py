from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.verify import Recipe, Slice, run_reference
from plait.verify.record.compare import relative_error
from plait.verify.reference.one_device import slicing_reasons
from tests.unit.verify.toy import Toy, batches, loss, reference, sgd, slices


def test_equals_a_plain_loop():
    record = reference(clip=0.5)
    model = Toy()
    optimizer = sgd(model.parameters())
    for (inputs, target), seen in zip(batches(), record.steps, strict=True):
        optimizer.zero_grad()
        value = (model(inputs) - target).square().sum() / len(inputs)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert seen.loss == pytest.approx(value.item(), rel=1e-12)
        assert seen.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            assert relative_error(seen.grads[name], parameter.grad, 1.0) < 1e-12
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert relative_error(seen.params[name], parameter.detach()) < 1e-12


def test_slices_add_up_to_the_whole():
    whole = reference(contributions=False)
    by_slice = run_reference(Toy(), batches(), Recipe(loss, sgd), slices, by_slice=True)
    for one, other in zip(whole.steps, by_slice.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        assert all(
            relative_error(one.params[name], other.params[name]) < 1e-12 for name in one.params
        )


def test_the_model_that_is_given_is_left_alone():
    model = Toy()
    before = model.first.weight.detach().clone()
    run_reference(model, batches(1), Recipe(loss, sgd))
    assert torch.equal(model.first.weight, before) and model.first.weight.grad is None


def test_a_mean_loss_is_weighted_by_samples():
    mean = run_reference(
        Toy(),
        batches(1),
        Recipe(lambda o, t: (o - t).square().sum() / len(o), sgd),
        slices,
        by_slice=True,
    )
    assert mean.steps[0].loss == pytest.approx(reference(steps=1).steps[0].loss, rel=1e-12)


def test_learning_rate_and_frozen():
    model = Toy()
    model.first.bias.requires_grad_(False)
    record = run_reference(
        model, batches(), Recipe(loss, sgd, lr_factor=lambda step: [1.0, 0.0][step])
    )
    assert record.steps[0].grads["first.bias"] is None and record.steps[0].grads["idle"] is None
    assert all(
        torch.equal(record.steps[1].params[name], value)
        for name, value in record.steps[0].params.items()
    )
    assert record.steps[1].lr == 0.0


def test_dropout_follows_the_seeds():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    assert "random" in slicing_reasons(model, batches(1)[0])[0]

    def run(seed):
        cut = lambda step, batch: [Slice(0, 0, batch, seed)]  # noqa: E731
        return run_reference(model, batches(1), Recipe(loss, sgd), cut, by_slice=True).steps[0].loss

    assert run(1) == run(1) != run(2)


def test_batch_norm_is_found_by_what_it_does():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    assert "batch-norm" in slicing_reasons(model, batches(1)[0])[0]
    assert slicing_reasons(Toy(), batches(1)[0]) == []


def test_a_module_that_holds_a_graph_does_not_stop_the_diagnosis():
    """A router keeps its last loss, which no deep copy can be made of."""

    class Keeps(Toy):
        kept = None

        def forward(self, inputs):
            self.kept = super().forward(inputs)
            return self.kept

    record = run_reference(Keeps(), batches(), Recipe(loss, sgd), slices, contributions=True)
    expected = reference(contributions=True)
    assert record.steps[1].stale_grads.keys() == expected.steps[1].stale_grads.keys()
    for name, grad in expected.steps[1].stale_grads.items():
        assert relative_error(record.steps[1].stale_grads[name], grad, 1.0) < 1e-12
