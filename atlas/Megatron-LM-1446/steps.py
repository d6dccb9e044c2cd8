"""A norm under sequence parallelism: its gradient is that of this rank's part of the sequence."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Gather(torch.autograd.Function):
    """Parts of the sequence of all ranks; every rank goes on with the whole."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.final_layernorm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 5)
        self.splits = False

    def forward(self, x):
        if self.splits:
            x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
            return self.head(Gather.apply(self.final_layernorm(x)))
        return self.head(self.final_layernorm(x))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6, 8), torch.randint(0, 5, (4, 6))) for _ in range(2)]
    return Net(), batches, cross_entropy


def prepare(model):
    model.splits = True
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, names):
    model, optimizer = state
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, ("input_layernorm", "post_attention_layernorm"))


def fixed(state, batch, loss):
    return update(state, batch, loss, ("input_layernorm", "post_attention_layernorm", "final"))
