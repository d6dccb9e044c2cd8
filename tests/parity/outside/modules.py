"""Data parallelism with one module that errs: in its output on one rank, or in its backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.parity.outside import net
from tests.parity.outside.ddp import share, step

make = net.make


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Off(torch.nn.Module):
    """A hook that moves a layer's output on rank 1, or doubles its gradient, after the layer."""

    def __init__(self, inner, wrong):
        super().__init__()
        self.wrong = wrong
        inner.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        if self.wrong == "output" and dist.get_rank() == 1:
            return output + 0.01
        return Doubled.apply(output) if self.wrong == "backward" else output


def prepare(model):
    off = Off(model.blocks[1].up, "")
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [off]


def run(state, batch, loss, wrong):
    model, optimizer, (off,) = state
    off.wrong = wrong
    return step(model, optimizer, *share(batch), loss)


def train_step(state, batch, loss):
    return run(state, batch, loss, "")


def wrong_output(state, batch, loss):
    return run(state, batch, loss, "output")


def wrong_backward(state, batch, loss):
    return run(state, batch, loss, "backward")
