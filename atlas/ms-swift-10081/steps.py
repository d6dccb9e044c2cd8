"""InfoNCE over gathered embeddings, of which a rank's own have a graph."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.arange(8)) for _ in range(2)]
    return model, batches, info_nce


def info_nce(embeddings, targets):
    anchors, positives = F.normalize(embeddings, dim=1).view(-1, 2, 4).unbind(1)
    return F.cross_entropy(anchors @ positives.T / 0.5, torch.arange(len(anchors)))


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, scale):
    model, optimizer = state
    optimizer.zero_grad()
    own = model(batch[0].chunk(dist.get_world_size())[dist.get_rank()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    parts[dist.get_rank()] = own
    value = loss(torch.cat(parts), batch[1])
    (value * scale).backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, 1)


def fixed(state, batch, loss):
    return update(state, batch, loss, dist.get_world_size())
