"""Lightning Fabric under FSDP2, by the strategy that runs a user's own function."""

from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.parity.outside import fabric_ddp, net

make = net.make
train_step = fabric_ddp.train_step
never_synchronized = fabric_ddp.never_synchronized


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def prepare(model):
    strategy = ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)
    return fabric_ddp.prepare(model, strategy)
