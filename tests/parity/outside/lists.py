"""Batches of `plait.SampleList` and of texts, divided over the ranks by the script."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from plait import SampleList
from tests.parity import lists_of_samples

loss = lists_of_samples.loss


def batches(kind):
    data = lists_of_samples.Entries(kind, labels=kind == "texts")
    return [data.batch(torch.arange(8) + 8 * number) for number in range(3)]


def make():
    return lists_of_samples.bags(), batches("bags"), loss


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train_step(state, batch, loss):
    model, optimizer = state
    assert isinstance(batch[0], SampleList) or isinstance(batch[0][0], str)
    inputs, targets = (part[dist.get_rank() :: dist.get_world_size()] for part in batch)
    value = loss(model(inputs), targets)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def equal_data(state, batch, loss):
    train_step(
        state,
        [SampleList(part[place] for place in (0, 0, 2, 2, 4, 4, 6, 6)) for part in batch],
        loss,
    )


def train(state, batches, loss):
    for batch in batches:
        train_step(state, batch, loss)
