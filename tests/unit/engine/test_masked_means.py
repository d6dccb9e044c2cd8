"""A loss that is one number and no mean over samples is told from one that is."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.comm.simulated import simulate
from plait.comm.world import World
from plait.engine.loss import LossFunction
from plait.engine.masked_means import MaskedMeanCheck
from plait.mesh import Mesh


def targets(lengths: list[int]) -> Tensor:
    """Classes [B, 4], of which each row keeps so many."""
    places = torch.arange(4).expand(len(lengths), 4)
    return torch.where(places < torch.tensor(lengths)[:, None], 1, -100)


def mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def said(plan: str, loss: LossFunction, lengths: list[int]) -> list[str]:
    """The warnings of two steps."""
    engine = plait.build(torch.nn.Linear(3, 5), plan, loss=loss, optimizer=torch.optim.SGD)
    batch = (torch.ones(len(lengths), 4, 3), targets(lengths))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(batch)
        engine.step(batch)
    engine.world.close()
    return [str(one.message) for one in caught if "mean over samples" in str(one.message)]


def test_a_mean_over_uneven_targets_is_told_once() -> None:
    (text,) = said("mb2", mean, [1, 4, 2, 2])
    assert "1 to 4 targets that are not -100" in text
    assert "return (sum, count)" in text


def test_micro_batches_of_one_sample_are_compared_with_each_other() -> None:
    assert len(said("mb2", mean, [1, 4])) == 1


@pytest.mark.parametrize(
    ("plan", "loss", "lengths"),
    [
        ("mb2", counted, [1, 4, 2, 2]),
        ("mb2", mean, [2, 2, 2, 2]),
        ("mb2", mean, [4, 4, 4, 4]),
        ("dp1", mean, [1, 4, 2, 2]),
    ],
)
def test_what_is_right_is_not_warned_of(plan: str, loss: LossFunction, lengths: list[int]) -> None:
    assert said(plan, loss, lengths) == []


def marked(mark: int, lengths: list[int]) -> Tensor:
    """Classes 1 to 4 in rows [B, 4], of which each keeps so many; the others are the mark."""
    labels = targets(lengths)
    return torch.where(labels == -100, mark, torch.arange(1, 5).expand_as(labels))


@pytest.mark.parametrize("lengths", [[1, 4, 2, 2], [1, 1, 2, 2]])
def test_a_class_that_the_loss_ignores_is_a_mask_too(lengths: list[int]) -> None:
    mean_without_zeros = torch.nn.CrossEntropyLoss(ignore_index=0)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return mean_without_zeros(output.flatten(0, 1), labels.flatten())

    (text,) = told("mb2", loss, marked(0, lengths))
    assert f"1 to {max(lengths)} targets that are not 0" in text
    assert "cross_entropy(..., ignore_index=0, reduction='sum') and (targets != 0).sum()" in text
    assert told("mb2", loss, marked(0, [3, 3, 3, 3])) == []


def test_a_mask_of_minus_one_is_seen_where_the_model_makes_the_loss() -> None:
    def given(output: Tensor, labels: Tensor) -> Tensor:
        return output.mean()

    (text,) = told("mb2", given, marked(-1, [1, 4, 2, 2]))
    assert "1 to 4 targets that are not -1;" in text
    assert told("mb2", given, torch.tensor([[1, -1], [1, 1], [-1, -1], [1, -1]])) == []


def test_a_mean_of_each_sample_may_have_targets_of_minus_one() -> None:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(output.mT, labels.clamp(min=0), reduction="none")
        mask = (labels != -1).float()
        return ((losses * mask).sum(1) / mask.sum(1)).mean()

    assert told("mb2", loss, marked(-1, [1, 4, 2, 2])) == []


def told(plan: str, loss: LossFunction, labels: Tensor) -> list[str]:
    """The warnings of a step with these targets."""
    engine = plait.build(torch.nn.Linear(3, 5), plan, loss=loss, optimizer=torch.optim.SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step((torch.ones(len(labels), 4, 3), labels))
    engine.world.close()
    return [str(one.message) for one in caught if "mean over samples" in str(one.message)]


@pytest.mark.parametrize(("loss", "number"), [(mean, 1), (counted, 0)])
def test_parts_of_a_sequence_differ_where_samples_do_not(loss: LossFunction, number: int) -> None:
    check = MaskedMeanCheck(loss, 1, 2)
    output = torch.ones(3, 4, 5, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(output, targets([4, 4, 4]))
        check(output, targets([2, 2, 2]))
    assert ["over the 2 parts of a batch" in str(one.message) for one in caught] == [True] * number


def test_a_mean_over_a_mask_is_uneven_over_parts_of_a_sequence() -> None:
    def loss(output: Tensor, mask: Tensor) -> Tensor:
        return (output.sum(-1) * mask).sum() / mask.sum()

    check = MaskedMeanCheck(loss, 1, 2)
    with pytest.warns(UserWarning, match="over the 2 parts of a batch"):
        check(torch.ones(3, 4, 5, requires_grad=True), (targets([2, 2, 2]) == 1).float())


WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def classes(plan: str, loss: LossFunction) -> list[str]:
    """The warnings of two steps on samples with one class each."""
    engine = plait.build(torch.nn.Linear(3, 3), plan, loss=loss, optimizer=torch.optim.SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.step((torch.ones(4, 3), torch.tensor([0, 1, 2, 1])))
    engine.world.close()
    return [str(one.message) for one in caught if "mean over samples" in str(one.message)]


def of_logs(output: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(output.log_softmax(-1), labels, weight=WEIGHTS)


def weighted_and_counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output, labels, weight=WEIGHTS, reduction="sum")
    return total, WEIGHTS[labels].sum()


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(weight=WEIGHTS), of_logs])
def test_a_mean_over_weights_of_classes_is_told_once(loss: LossFunction) -> None:
    (text,) = classes("mb2", loss)
    assert "a mean over the weights of classes" in text
    assert "over the 2 parts of a batch" in text
    assert "weight[targets].sum()" in text


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ("dp1", of_logs),
        ("mb2", weighted_and_counted),
        ("mb2", F.cross_entropy),
        ("mb2", torch.nn.CrossEntropyLoss(weight=torch.full((3,), 2.0))),
    ],
)
def test_other_losses_of_classes_say_nothing(plan: str, loss: LossFunction) -> None:
    assert classes(plan, loss) == []


def sum_of_classes(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, reduction="sum")


def sum_and_mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels) + sum_of_classes(output, labels)


def sum_by_hand(output: Tensor, labels: Tensor) -> Tensor:
    return -output.log_softmax(-1)[torch.arange(len(labels)), labels].sum()


def masked(output: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(output, labels, reduction="none") * (labels != 0)).sum()


def masked_by_floats(output: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != 0).to(output.dtype)
    return (mask * F.cross_entropy(output, labels, reduction="none")).sum()


def sum_in_a_loop(output: Tensor, labels: Tensor) -> Tensor:
    losses = [F.cross_entropy(output[i], labels[i]) for i in range(len(labels))]
    return torch.stack(losses).sum()


def sum_of_a_list(output: Tensor, labels: Tensor) -> Tensor:
    return sum(
        (F.cross_entropy(*pair) for pair in zip(output, labels, strict=True)), torch.tensor(0.0)
    )


@pytest.mark.parametrize(
    "loss",
    [
        *(sum_of_classes, sum_and_mean, sum_by_hand, masked, masked_by_floats),
        *(sum_in_a_loop, sum_of_a_list),
    ],
)
def test_a_sum_over_samples_is_told_once(loss: LossFunction) -> None:
    (text,) = classes("mb2", loss)
    assert "it is a sum over them" in text
    assert "are divided by 2: return (sum, count) instead" in text


def over_samples(output: Tensor, labels: Tensor) -> Tensor:
    return sum_of_classes(output, labels) / len(labels)


def mean_of_sums(output: Tensor, labels: Tensor) -> Tensor:
    return (output - F.one_hot(labels, 3)).pow(2).sum(1).mean()


def sum_of_means(output: Tensor, labels: Tensor) -> Tensor:
    return (output - F.one_hot(labels, 3)).pow(2).mean(0).sum()


def mean_by_a_factor(output: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(output, labels, reduction="none") * (1 / len(labels))).sum()


def mean_by_weights(output: Tensor, labels: Tensor) -> Tensor:
    weights = torch.softmax(labels.to(output.dtype), 0)
    return (weights * F.cross_entropy(output, labels, reduction="none")).sum()


def mean_by_a_mask(output: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != 0).float().div_((labels != 0).sum())
    return (mask * F.cross_entropy(output, labels, reduction="none")).sum()


def mean_by_a_mask_and_weights(output: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(output, labels, reduction="none") * (labels != 0)
    return (losses * torch.softmax(labels.to(output.dtype), 0)).sum()


def two_means(output: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(output, labels), output.pow(2).mean()]).sum()


def with_penalty(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels) + 0.1 * WEIGHTS.pow(2).sum()


def mean_by_rows_of_a_mask(output: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).float()
    mask[labels >= 0] = 1 / mask.sum()
    return (F.cross_entropy(output, labels, reduction="none") * mask).sum()


def mean_by_data_of_a_mask(output: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).float()
    mask.data.div_(mask.sum())
    return (F.cross_entropy(output, labels, reduction="none") * mask).sum()


def weighted_features(output: Tensor, labels: Tensor) -> Tensor:
    return (output.var(0) * torch.arange(3)).sum()


def mean_in_a_loop(output: Tensor, labels: Tensor) -> Tensor:
    losses = [F.cross_entropy(*pair) for pair in zip(output, labels, strict=True)]
    return torch.stack(losses).mean()


def mean_of_a_list(output: Tensor, labels: Tensor) -> Tensor:
    return sum_of_a_list(output, labels) / len(labels)


def mean_of_shares(output: Tensor, labels: Tensor) -> Tensor:
    shares = [F.cross_entropy(*pair) / len(labels) for pair in zip(output, labels, strict=True)]
    return torch.stack(shares).sum()


def mean_in_place(output: Tensor, labels: Tensor) -> Tensor:
    total = sum_of_classes(output, labels)
    total /= len(labels)
    return total


def mean_in_place_by_a_product(output: Tensor, labels: Tensor) -> Tensor:
    return sum_of_a_list(output, labels).mul_(1 / len(labels))


def two_terms_of_one_sample(output: Tensor, labels: Tensor) -> Tensor:
    terms = [torch.stack([row.mean(), row.pow(2).mean()]).sum() for row in output]
    return torch.stack(terms).mean()


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        *[("mb2", loss) for loss in (mean_in_a_loop, mean_of_a_list, mean_of_shares)],
        *[("mb2", loss) for loss in (mean_in_place, mean_in_place_by_a_product)],
        ("mb2", two_terms_of_one_sample),
        ("dp1", sum_of_classes),
        *[("mb2", loss) for loss in (mean_by_rows_of_a_mask, mean_by_data_of_a_mask)],
        ("mb2", weighted_features),
        *[("mb2", loss) for loss in (over_samples, mean_of_sums, sum_of_means)],
        *[("mb2", loss) for loss in (mean_by_a_factor, mean_by_weights)],
        *[("mb2", loss) for loss in (mean_by_a_mask, mean_by_a_mask_and_weights)],
        *[("mb2", loss) for loss in (two_means, with_penalty)],
    ],
)
def test_a_mean_by_way_of_a_sum_says_nothing(plan: str, loss: LossFunction) -> None:
    assert classes(plan, loss) == []


def test_as_many_heads_as_samples_are_no_samples() -> None:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        heads = output.unflatten(1, (2, 3)).transpose(0, 1)
        return sum((F.cross_entropy(head, labels) for head in heads), torch.tensor(0.0))

    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(torch.ones(2, 6, requires_grad=True), torch.tensor([0, 2]))


def test_the_cure_of_a_sum_is_the_sum_of_one_device() -> None:
    def kept(output: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        return sum_of_classes(output, labels), 1 / 2

    losses = []
    for plan, loss in (("dp1", sum_of_classes), ("mb2", kept)):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        engine = plait.build(
            model, f"{plan} precision:float64", loss=loss, optimizer=torch.optim.SGD
        )
        batch = (torch.ones(4, 3), torch.tensor([0, 1, 2, 1]))
        losses += [[engine.step(batch).loss for _ in range(2)]]
        engine.world.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)


class Words(torch.nn.Module):
    """A block that attends, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList([Attending(), Attending()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one[:, None] for one in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def in_parts(world: World, kept: int) -> float:
    engine = plait.build(Words(), "cp2:ring", loss=mean, optimizer=torch.optim.SGD, world=world)
    tokens = torch.arange(16).view(2, 8) % 8
    return engine.step((tokens, tokens.where(torch.arange(8) < kept, -100))).loss


@pytest.mark.parametrize(("kept", "is_told"), [(5, True), (8, False)])
def test_a_masked_mean_under_context_parallelism_is_told(kept: int, is_told: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(Mesh(cp=2), in_parts, kept)
    texts = [str(one.message) for one in caught if "mean over samples" in str(one.message)]
    assert bool(texts) is is_told
    assert all("the parts of a sequence may have unequal numbers" in text for text in texts)
