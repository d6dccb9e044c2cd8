"""A head whose halves lie on two ranks, behind Megatron's copy region and a transposition."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


class Net(torch.nn.Module):
    """A body, and a head that is the sum of two parts; a rank computes one."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.enter = None

    def forward(self, x):
        hidden = self.body(x)
        if self.enter is None:
            return sum(part(hidden.transpose(0, 1)) for part in self.head).transpose(0, 1)
        part = self.head[dist.get_rank()](self.enter(hidden))
        whole = reduce_from_tensor_model_parallel_region(part, group=dist.group.WORLD)
        return whole.transpose(0, 1)


def copied_then_transposed(hidden):
    hidden = copy_to_tensor_model_parallel_region(hidden, group=dist.group.WORLD)
    return hidden.transpose(0, 1).contiguous()


def transposed_then_copied(hidden):
    hidden = hidden.transpose(0, 1).contiguous()
    return copy_to_tensor_model_parallel_region(hidden, group=dist.group.WORLD)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6, 8), torch.randint(0, 5, (4, 6))) for _ in range(2)]
    return Net(), batches, cross_entropy


def prepare(model):
    own = [*model.body.parameters(), *model.head[dist.get_rank()].parameters()]
    return model, torch.optim.SGD(own, lr=0.1)


def update(state, batch, loss, enter):
    model, optimizer = state
    model.enter = enter
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, copied_then_transposed)


def fixed(state, batch, loss):
    return update(state, batch, loss, transposed_then_copied)
