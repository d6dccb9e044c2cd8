"""A router that tensor ranks hold as a DTensor, and whose scores weigh each rank's own expert."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


class Net(torch.nn.Module):
    """Two experts weighed by a router; a rank computes one of them."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.placements = None
        self.mesh = None

    def forward(self, x):
        if self.mesh is None:
            scores = self.router(x).softmax(1)
            return sum(scores[:, i : i + 1] * one(x) for i, one in enumerate(self.experts))
        whole = DTensor.from_local(x, self.mesh, [Replicate()])
        scores = self.router(whole).softmax(1).to_local(grad_placements=self.placements)
        own = dist.get_rank()
        return Sum.apply(scores[:, own : own + 1] * self.experts[own](x))


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    model.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(model.router.weight.data, model.mesh, [Replicate()])
    model.router.weight = torch.nn.Parameter(weight)
    own = [*model.router.parameters(), *model.experts[dist.get_rank()].parameters()]
    return model, torch.optim.SGD(own, lr=0.1, foreach=False)


def update(state, batch, loss, placements):
    model, optimizer = state
    model.placements = placements
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, None)


def fixed(state, batch, loss):
    return update(state, batch, loss, [Partial()])
