"""FSDP1 over two replicas that are not sharded: groups of one rank, and a strategy that says so."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

SHARDS = 1


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def train(model, batches, loss, **layout):
    model = FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), **layout
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
        loss(model(inputs), targets).backward()
        optimizer.step()


def broken(model, batches, loss):
    shape = (dist.get_world_size() // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))
    strategy = ShardingStrategy.HYBRID_SHARD
    train(model, batches, loss, device_mesh=mesh, sharding_strategy=strategy)


def fixed(model, batches, loss):
    train(model, batches, loss, sharding_strategy=ShardingStrategy.NO_SHARD)
