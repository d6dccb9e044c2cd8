"""A loss that takes positions of a sequence together is told where a plan cuts sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.simulated import simulate
from plait.comm.world import World
from plait.engine.build import build
from plait.engine.masked_means import MaskedMeanCheck
from plait.errors import ModelError
from plait.mesh import Mesh
from tests.unit.engine.test_masked_means import Words

Loss = Callable[[Tensor, Tensor], "Tensor | tuple[Tensor, Tensor | int]"]


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def shifted(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def shifted_and_counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    last = output.shape[1] - 1
    total = F.cross_entropy(output.narrow(1, 0, last).mT, labels[:, 1:], reduction="sum")
    return total, torch.tensor(labels[:, 1:].numel())


def of_first(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output[:, 0], labels[:, 0])


def of_mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mean(1), labels.new_zeros(len(labels)))


def of_sequences(output: Tensor, labels: Tensor) -> Tensor:
    logs = output.log_softmax(-1).gather(2, labels[..., None]).squeeze(2)
    return -F.logsigmoid(logs.sum(-1)).mean()


def sum_of_each(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, labels, reduction="none").sum(1).mean()


def span(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output[..., 0], labels.new_zeros(len(labels)))


def rolled(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output, labels.roll(-1, 1))


def smooth(output: Tensor, labels: Tensor) -> Tensor:
    return output.diff(1, 1).abs().mean()


def centred(output: Tensor, labels: Tensor) -> Tensor:
    return (output - output.mean(1, keepdim=True)).pow(2).mean()


def attention(output: Tensor, labels: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(output, output, output).mean()


def attention_by_hand(output: Tensor, labels: Tensor) -> Tensor:
    heads = output.unflatten(2, (2, 4)).transpose(1, 2)
    return ((heads @ heads.mT).softmax(-1) @ heads).mean()


def attention_of_torch(output: Tensor, labels: Tensor) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        seen = nn.MultiheadAttention(8, 2, batch_first=True)(output, output, output)[0]
    return (output - seen).pow(2).mean()


def recurrent(output: Tensor, labels: Tensor) -> Tensor:
    return nn.GRU(8, 3, batch_first=True)(output)[0].mean()


def sliding(output: Tensor, labels: Tensor) -> Tensor:
    return F.conv1d(output.mT, torch.ones(1, 8, 3)).mean()


def neighbours(output: Tensor, labels: Tensor) -> Tensor:
    return (output[:, 1:] - output[:, :-1]).pow(2).mean()


def halves(output: Tensor, labels: Tensor) -> Tensor:
    middle = output.size(1) // 2
    return (output[:, :middle] - output[:, middle:]).pow(2).mean()


def chunks_side_by_side(output: Tensor, labels: Tensor) -> Tensor:
    first, second = output.chunk(2, dim=1)
    return (first.exp() * second).mean() + cross_entropy(output, labels)


def split_and_compared(output: Tensor, labels: Tensor) -> Tensor:
    first, second = torch.split(output, output.size(1) // 2, 1)
    return F.mse_loss(first, second)


def part_of_a_split(output: Tensor, labels: Tensor) -> Tensor:
    _, rest = output.split([1, output.size(1) - 1], dim=1)
    return rest.square().mean()


def steps(output: Tensor, labels: Tensor) -> Tensor:
    each = output.unbind(1)
    apart = [(one - other).square().mean() for one, other in pairwise(each)]
    return torch.stack(apart).mean()


def shifted_one_by_one(output: Tensor, labels: Tensor) -> Tensor:
    places = range(output.size(1) - 1)
    losses = [F.cross_entropy(output[:, i], labels[:, i + 1]) for i in places]
    return torch.stack(losses).mean()


def shifted_in_each_sample(output: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(output, labels, strict=True)
    return torch.stack([F.cross_entropy(one[:-1], wanted[1:]) for one, wanted in pairs]).mean()


def shifted_by_index(output: Tensor, labels: Tensor) -> Tensor:
    samples = range(len(output))
    return torch.stack([cross_entropy_of(output[i], labels[i]) for i in samples]).mean()


def cross_entropy_of(row: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(row.float()[:-1], labels[1:])


def aligned(output: Tensor, labels: Tensor) -> Tensor:
    logs = output.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(labels),), output.size(1))
    return F.ctc_loss(logs, labels.clamp(min=1), lengths, torch.ones_like(lengths))


MIXING = [
    *(neighbours, halves, chunks_side_by_side, split_and_compared, part_of_a_split, steps),
    *(shifted_one_by_one, shifted_in_each_sample, shifted_by_index, aligned),
    *(shifted, shifted_and_counted, of_first, of_mean, of_sequences, sum_of_each, span, rolled),
    *(smooth, centred, attention, attention_by_hand, attention_of_torch, recurrent, sliding),
]


def each(output: Tensor, labels: Tensor) -> Tensor:
    places = range(output.size(1))
    return torch.stack([F.cross_entropy(output[:, i], labels[:, i]) for i in places]).mean()


def pieces(output: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    starts = range(0, output.size(1), 4)
    parts = [(output[:, i : i + 4], labels[:, i : i + 4]) for i in starts]
    losses = [F.cross_entropy(own.mT, wanted, reduction="sum") for own, wanted in parts]
    return torch.stack(losses).sum(), labels.numel()


def chunks(output: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(output.chunk(2, 1), labels.chunk(2, dim=1), strict=True)
    return torch.stack([F.cross_entropy(own.mT, wanted) for own, wanted in pairs]).mean()


def unbound(output: Tensor, labels: Tensor) -> Tensor:
    total = output.new_zeros(len(output))
    for own, wanted in zip(output.unbind(dim=1), labels.unbind(1), strict=True):
        total = total + F.cross_entropy(own, wanted, reduction="none")
    return total.mean() / output.size(1)


def pieces_of_each_sample(output: Tensor, labels: Tensor) -> Tensor:
    losses = [
        F.cross_entropy(output[i][place : place + 2], labels[i][place : place + 2])
        for i in range(len(output))
        for place in range(0, output.size(1), 2)
    ]
    return torch.stack(losses).mean()


def places_of_each_sample(output: Tensor, labels: Tensor) -> Tensor:
    samples = [
        list(zip(one, wanted, strict=True)) for one, wanted in zip(output, labels, strict=True)
    ]
    return torch.stack([F.cross_entropy(*pair) for pairs in samples for pair in pairs]).mean()


def chunks_with_a_metric(output: Tensor, labels: Tensor) -> Tensor:
    assert (output[:, -1].argmax(-1) == labels[:, -1]).float().mean() <= 1
    return chunks(output, labels)


def mean_of_means(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, labels, reduction="none").mean(1).mean()


def mean_by_hand(output: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(output.mT, labels, reduction="none")
    return (losses.sum(1) / losses.size(1)).mean()


def mean_by_weights(output: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(output.mT, labels, reduction="none")
    return (losses * (1 / losses.size(1))).sum(1).mean()


def of_places(output: Tensor, labels: Tensor) -> Tensor:
    logs = output.log_softmax(-1)
    own = logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (-((1 - own.exp()) ** 2) * own).mean() + (output.logsumexp(-1) ** 2).mean()


def of_features(output: Tensor, labels: Tensor) -> Tensor:
    parts = output.topk(1)[0].mean() + output.max(-1)[0].mean() + output.std(-1).mean()
    return parts + (output - output.roll(1, -1)).pow(2).mean() + output[:, :, :3].mean()


def of_samples(output: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(output, labels, strict=True)
    return torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean()


def counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.mT, labels, reduction="none").sum(1).sum()
    return total, torch.tensor(labels.numel())


def with_accuracy(output: Tensor, labels: Tensor) -> Tensor:
    (output[:, 0].argmax(-1) == labels[:, 0]).float().mean()
    return cross_entropy(output, labels)


PLACE_BY_PLACE = [
    *(
        cross_entropy,
        each,
        *(
            pieces,
            chunks,
            chunks_with_a_metric,
            unbound,
            pieces_of_each_sample,
            places_of_each_sample,
        ),
        mean_of_means,
        mean_by_hand,
        mean_by_weights,
        of_places,
        of_features,
    ),
    *(of_samples, counted, with_accuracy),
]


def texts(loss: Loss, positions: int) -> list[str]:
    """The warnings of two looks at a part of three sequences."""
    check = MaskedMeanCheck(loss, 1, 2)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            output = torch.randn(3, positions, 8, requires_grad=True)
            check(output, torch.arange(3 * positions).view(3, positions) % 8)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("loss", MIXING)
def test_a_loss_that_takes_positions_together_is_told_once(loss: Loss) -> None:
    (text,) = texts(loss, 6)
    assert "takes positions of a sequence together" in text
    assert "one of 2 parts" in text


@pytest.mark.parametrize("positions", [6, 8])
@pytest.mark.parametrize("loss", PLACE_BY_PLACE)
def test_a_loss_of_each_position_says_nothing(loss: Loss, positions: int) -> None:
    assert texts(loss, positions) == []


def summed_over_samples(output: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.mT, labels, reduction="sum"), len(labels)


def summed_over_a_tensor(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum(), torch.tensor(output.shape[0])


@pytest.mark.parametrize("loss", [summed_over_samples, summed_over_a_tensor])
def test_a_sum_over_positions_with_a_count_of_samples_is_told(loss: Loss) -> None:
    (text,) = texts(loss, 6)
    assert "each of the 2 parts of a sequence counts its samples" in text
    assert "labels.numel()" in text


def mean_with_a_weight(output: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.mT, labels) * len(labels), len(labels)


def of_as_many_as_samples(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    kept = labels == 0
    losses = F.cross_entropy(output.mT, labels, reduction="none")
    return (losses * kept).sum(), kept.sum()


def of_a_read_number(output: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    total, count = of_as_many_as_samples(output, labels)
    return total, count.item()


@pytest.mark.parametrize("loss", [mean_with_a_weight, of_as_many_as_samples, of_a_read_number])
def test_a_count_that_is_right_in_each_part_says_nothing(loss: Loss) -> None:
    assert texts(loss, 8) == []


def in_parts(world: World) -> None:
    engine = build(Words(), "cp2:ring", loss=shifted, optimizer=torch.optim.SGD, world=world)
    tokens = torch.arange(16).view(2, 8) % 8
    engine.step((tokens, tokens))


def test_a_shift_of_labels_in_the_loss_is_told_under_context_parallelism() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(Mesh(cp=2), in_parts)
    told = [str(one.message) for one in caught if "positions of a sequence" in str(one.message)]
    assert told
    assert all("shift targets before engine.step" in text for text in told)


@pytest.mark.filterwarnings("ignore:rank 1 brought other initial values")
def test_lengths_of_whole_sequences_are_explained_where_parts_are_aligned() -> None:
    def of_whole(output: Tensor, labels: Tensor) -> Tensor:
        logs = output.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, labels, torch.full((2,), 8), torch.ones(2, dtype=torch.long))

    def train(world: World) -> None:
        engine = build(Words(), "cp2:ring", loss=of_whole, optimizer=torch.optim.SGD, world=world)
        tokens = torch.arange(16).view(2, 8) % 8
        engine.step((tokens, tokens))

    match = "calls ctc_loss, which needs whole sequences, .* one of 2 parts .* leave cp out"
    with pytest.raises(ModelError, match=match):
        simulate(Mesh(cp=2), train)
