"""A loss of reinforcement learning that is a sum over samples is told; learnt weights are none."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.masked_means import MaskedMeanCheck
from plait.engine.mixed_losses import MixedSamples
from plait.engine.sample_sums import SampleSums

Loss = Callable[[Tensor, Tensor], Tensor]


def said(loss: Loss) -> list[str]:
    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(torch.randn(4, 3, requires_grad=True), torch.randn(4, 3))
    return [str(one.message) for one in caught]


def of_actions(output: Tensor, targets: Tensor) -> Tensor:
    """The sum of REINFORCE over an episode: actions of 3, with their returns."""
    actions, returns = targets[:, 0].gt(0).long(), targets[:, 1]
    taken = output.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    return -(taken * returns).sum()


def of_a_distribution(output: Tensor, targets: Tensor) -> Tensor:
    """The same, by torch's distributions, which read sizes."""
    actions = torch.distributions.Categorical(logits=output)
    return -(actions.log_prob(targets[:, 0].gt(0)) * targets[:, 1]).sum()


def of_a_critic(output: Tensor, targets: Tensor) -> Tensor:
    values, returns = output[:, 0], targets[:, 0]
    return -(output.log_softmax(-1)[:, 1] * (returns - values.detach())).sum()


def of_a_divided_target(output: Tensor, targets: Tensor) -> Tensor:
    return -(output.log_softmax(-1)[:, 1] * (targets[:, 0] / len(targets))).sum()


@pytest.mark.parametrize("loss", [of_actions, of_a_distribution, of_a_critic])
def test_a_sum_of_a_policy_is_told(loss: Loss) -> None:
    (told,) = said(loss)
    assert "it is a sum over them" in told


def test_a_policy_over_the_number_of_samples_says_nothing() -> None:
    assert said(of_a_divided_target) == []


def test_learnt_weights_of_losses_among_the_outputs_are_no_samples() -> None:
    """A model of two heads returns the logarithms of their variances, too."""
    spreads = nn.Parameter(torch.zeros(2))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        losses = torch.stack([F.mse_loss(output, targets), output.square().mean()])
        return (torch.exp(-spreads) * losses + spreads).sum()

    output, targets = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    with SampleSums((spreads, output), targets) as sums:
        assert not sums.has(loss(output, targets))
    with MixedSamples((spreads, output), targets) as mixed:
        assert not mixed.found(loss(output, targets))
        assert mixed.found(F.mse_loss(output, targets).sqrt())
