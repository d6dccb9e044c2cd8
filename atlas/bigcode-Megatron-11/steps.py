"""Attention whose query heads lie on two ranks, and whose keys and values are shared."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

HEADS = 2
WIDTH = 4


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.ModuleList(torch.nn.Linear(8, WIDTH) for _ in range(HEADS))
        self.key_value = torch.nn.Linear(8, 2 * WIDTH)
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 5) for _ in range(HEADS))
        self.splits = False

    def head(self, x, index):
        key, value = self.key_value(x).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(self.query[index](x), key, value, is_causal=True)
        return self.out[index](mixed)

    def forward(self, x):
        if self.splits:
            return Sum.apply(self.head(x, dist.get_rank()))
        return self.head(x, 0) + self.head(x, 1)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6, 8), torch.randint(0, 5, (4, 6))) for _ in range(2)]
    return Net(), batches, cross_entropy


def prepare(model):
    model.splits = True
    rank = dist.get_rank()
    own = [*model.query[rank].parameters(), *model.out[rank].parameters()]
    return model, torch.optim.SGD([*own, *model.key_value.parameters()], lr=0.1)


def update(state, batch, loss, shared):
    model, optimizer = state
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for parameter in shared:
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, [state[0].key_value.weight])


def fixed(state, batch, loss):
    return update(state, batch, loss, state[0].key_value.parameters())
