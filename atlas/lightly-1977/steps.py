"""Barlow Twins under DDP: two ranks hold halves of the batch and add up their correlations."""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

# The file of the loss alone: the package's own start needs torchvision.
PACKAGE = Path(importlib.util.find_spec("lightly").origin).parent
SPEC = importlib.util.spec_from_file_location("barlow", PACKAGE / "loss/barlow_twins_loss.py")
BARLOW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BARLOW)


class Net(torch.nn.Module):
    """Both views of a sample through one layer, each normalised already."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.layer(x[:, 0]), self.layer(x[:, 1])


def twins(output, targets):
    return BARLOW.BarlowTwinsLoss()(*output)


def make():
    torch.manual_seed(0)
    # Halves of equal mean and covariance, so that each rank normalises as one device does.
    vector = F.normalize(torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0]).double(), dim=0)
    mirror = torch.eye(6).double() - 2 * vector.outer(vector)
    batches = []
    for _ in range(2):
        half = torch.randn(6, 2, 6).double()
        other = torch.einsum("st,tvf->svf", mirror, half)
        batches.append((torch.cat([half, other]), torch.zeros(12)))
    return Net(), batches, twins


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss):
    model, optimizer = state
    optimizer.zero_grad()
    inputs = batch[0].chunk(dist.get_world_size())[dist.get_rank()]
    value = loss(*model(inputs))
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, BARLOW.BarlowTwinsLoss(gather_distributed=True))


def fixed(state, batch, loss):
    whole = BARLOW.BarlowTwinsLoss(gather_distributed=True)

    def forward(first, second):
        count = len(first)
        matrix = BARLOW._normalize(first).T @ BARLOW._normalize(second) / count
        matrix = all_reduce(matrix / dist.get_world_size())
        on = (torch.diagonal(matrix) - 1).pow(2).sum()
        return on + whole.lambda_param * BARLOW._off_diagonal(matrix).pow(2).sum()

    return update(state, batch, forward)
