"""An embedding in two shards whose rows of padding are set to zero from the second update on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

PADDING = 2


def embedding():
    torch.manual_seed(0)
    return torch.nn.Embedding(8, 6, dtype=torch.float64)


class Side:
    """One side: a model, its optimizer, and how rows become zero."""

    def __init__(self, shards):
        self.model = embedding()
        if shards:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            whole = self.model.weight.data
            self.model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, number, clear):
        torch.manual_seed(number)
        tokens = torch.randint(PADDING, 8, (4, 3))
        targets = torch.randint(0, 6, (4, 3))
        self.optimizer.zero_grad()
        weight = self.model.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        logits = F.embedding(tokens, weight)
        value = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        value.backward()
        grad = whole(self.model.weight.grad)
        self.optimizer.step()
        if number > 0:
            with torch.no_grad():
                clear(self.model.weight)
        params = {"weight": whole(self.model.weight)}
        return {"loss": value.item(), "grads": {"weight": grad}, "params": params}


def whole(value):
    value = value.detach()
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def slice_to_zero(weight):
    weight[:PADDING].zero_()


def mask_to_zero(weight):
    keep = torch.ones(8, 1, dtype=torch.float64)
    keep[:PADDING] = 0
    if hasattr(weight, "device_mesh"):
        keep = distribute_tensor(keep, weight.device_mesh, [Shard(0)])
    weight.mul_(keep)


SIDES = []


def reference_step(number):
    if number == 0:
        SIDES[:] = [Side(shards=False), Side(shards=True)]
    return SIDES[0].step(number, slice_to_zero)


def parallel_step(number):
    return SIDES[1].step(number, mask_to_zero)
