"""A head split over tensor ranks, whose loss is computed in chunks of the samples."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

CHUNKS = 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 6, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for parts, placement in ((model.body, Replicate()), (model.head, Shard(0))):
        for name, one in list(parts.named_parameters()):
            split = distribute_tensor(one.data, mesh, [placement])
            setattr(parts, name, torch.nn.Parameter(split))
    return model, mesh, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def update(state, batch, loss, placements_of):
    model, mesh, optimizer = state
    optimizer.zero_grad()
    x = DTensor.from_local(batch[0], mesh, [Replicate()])
    hidden = torch.tanh(model.body(x))
    leaf = hidden.detach()
    buffers = []
    value = 0
    with loss_parallel():
        for chunk, targets in zip(leaf.chunk(CHUNKS), batch[1].chunk(CHUNKS), strict=True):
            part = chunk.detach().requires_grad_()
            own = loss(model.head(part), targets) / CHUNKS
            own.backward()
            value = value + own.detach().full_tensor()
            buffers.append(part.grad)
    grad = torch.cat([one.to_local() for one in buffers])
    hidden.backward(DTensor.from_local(grad, mesh, placements_of(leaf, buffers[0])))
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, lambda activation, grad: activation.placements)


def fixed(state, batch, loss):
    return update(state, batch, loss, lambda activation, grad: grad.placements)
