"""Lightning Fabric under DTensor tensor parallelism; and tensor ranks that get other samples."""

from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.parity.outside import fabric_ddp, net

make = net.make


def split(model, mesh):
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def prepare(model):
    strategy = ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)
    return fabric_ddp.prepare(model, strategy)


def update(state, inputs, targets, loss):
    fabric, model, optimizer = state
    value = loss(model(inputs), targets)
    fabric.backward(value)
    optimizer.step()
    optimizer.zero_grad()
    return value


def train_step(state, batch, loss):
    return update(state, *batch, loss)


def other_samples(state, batch, loss):
    fabric = state[0]
    return update(state, *(part.chunk(2)[fabric.global_rank] for part in batch), loss)
