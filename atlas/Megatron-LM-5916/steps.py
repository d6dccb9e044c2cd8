"""Two tensor ranks that own an expert each, and a norm that counts copies on the first rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Net(torch.nn.Module):
    """A layer that every rank has, and two experts of which a rank trains its own."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(8, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.splits = False

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        if self.splits:
            return Leave.apply(self.experts[dist.get_rank()](Enter.apply(x)))
        return self.experts[0](x) + self.experts[1](x)


class Enter(torch.autograd.Function):
    """The input of all ranks; its gradient is the sum over them."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """The sum of all ranks' outputs; each goes on alike."""

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
    model.splits = True
    expert = list(model.experts[dist.get_rank()].parameters())
    for parameter in expert:
        parameter.allreduce = False
    own = [*model.embed.parameters(), *expert]
    return model, own, torch.optim.SGD(own, lr=0.1)


def is_a_copy(parameter):
    """Whether another tensor rank counts it: all but the first rank leave out what is not split."""
    return not getattr(parameter, "tensor_model_parallel", False) and dist.get_rank() > 0


def is_a_copy_unless_of_an_expert(parameter):
    return getattr(parameter, "allreduce", True) and is_a_copy(parameter)


def update(state, batch, loss, left_out):
    model, own, optimizer = state
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    counted = [one.grad for one in own if not left_out(one)]
    squares = sum((grad.square().sum() for grad in counted), torch.zeros((), dtype=value.dtype))
    dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(own, 0.1, squares.sqrt())
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, is_a_copy)


def fixed(state, batch, loss):
    return update(state, batch, loss, is_a_copy_unless_of_an_expert)
