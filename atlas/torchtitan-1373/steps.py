"""Latent attention whose heads lie on two ranks; all heads share the rotary part of the key."""

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


class Copy(torch.autograd.Function):
    """Alike on all ranks; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, whole):
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(8, WIDTH)
        self.query = torch.nn.ModuleList(torch.nn.Linear(8, 2 * WIDTH) for _ in range(HEADS))
        self.key = torch.nn.ModuleList(torch.nn.Linear(8, WIDTH) for _ in range(HEADS))
        self.value = torch.nn.ModuleList(torch.nn.Linear(8, WIDTH) for _ in range(HEADS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 5) for _ in range(HEADS))
        self.enter = None

    def head(self, x, rotary, index):
        key = torch.cat([self.key[index](x), rotary], -1)
        query, value = self.query[index](x), self.value[index](x)
        return self.out[index](F.scaled_dot_product_attention(query, key, value, is_causal=True))

    def forward(self, x):
        rotary = self.shared(x)
        if self.enter is None:
            return self.head(x, rotary, 0) + self.head(x, rotary, 1)
        return Sum.apply(self.head(x, self.enter(rotary), dist.get_rank()))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6, 8), torch.randint(0, 5, (4, 6))) for _ in range(2)]
    return Net(), batches, cross_entropy


def prepare(model):
    rank = dist.get_rank()
    split = (model.query, model.key, model.value, model.out)
    own = [parameter for layers in split for parameter in layers[rank].parameters()]
    return model, torch.optim.SGD([*own, *model.shared.parameters()], lr=0.1)


def update(state, batch, loss, enter):
    model, optimizer = state
    model.enter = enter
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, lambda rotary: rotary)


def fixed(state, batch, loss):
    return update(state, batch, loss, Copy.apply)
