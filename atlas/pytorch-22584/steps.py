"""Seven samples for two ranks, dealt by torch's DistributedSampler."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(7, 8), torch.randint(0, 4, (7,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, own):
    model, optimizer = state
    optimizer.zero_grad()
    total = loss(model(batch[0][own]), batch[1][own], reduction="sum")
    count = torch.tensor(float(len(own)))
    dist.all_reduce(count)
    (total / count * dist.get_world_size()).backward()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, list(DistributedSampler(batch[0], shuffle=False)))


def fixed(state, batch, loss):
    own = list(range(dist.get_rank(), len(batch[0]), dist.get_world_size()))
    update(state, batch, loss, own)
