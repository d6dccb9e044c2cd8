"""Shared memory as a process group of torch: DDP, FSDP2 and DTensor compute on it as on Gloo."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from plait.comm.shm import process_group


def _trained(model, rank):
    """The parameters after three steps on the own data."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def _by_ddp(model, group, rank):
    return _trained(DistributedDataParallel(model, process_group=group), rank)


def _by_fsdp(model, group, rank):
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return _trained(model, rank)


def _resharded(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    value = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    return [
        value.sum().full_tensor(),
        value.redistribute(mesh, [Replicate()]).to_local(),
        value.redistribute(mesh, [Shard(1)]).to_local(),
    ]


def _operations(group, rank):
    mean = torch.full((3, 2), float(rank)).t()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    largest = torch.tensor([float(rank)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    gathered = [torch.empty(2) for _ in range(2)]
    dist.all_gather(gathered, torch.full((2,), float(rank)), group=group)
    dist.barrier(group=group)
    return mean.tolist(), largest.item(), torch.stack(gathered).tolist()


def _compare(world):
    process_group.register()
    rank = dist.get_rank()
    shared = dist.new_group(backend="plait")
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for train in (_by_ddp, _by_fsdp):
        expected = train(copy.deepcopy(model), gloo, rank)
        for value, other in zip(train(copy.deepcopy(model), shared, rank), expected, strict=True):
            assert torch.equal(value, other)
    for value, other in zip(_resharded(shared), _resharded(gloo), strict=True):
        assert torch.equal(value, other)
    found = _operations(shared, rank)
    is_shared = shared.is_shared
    dist.barrier(group=gloo)
    dist.destroy_process_group(shared)
    dist.destroy_process_group(gloo)
    return is_shared, found


def test_ddp_fsdp_and_dtensor_equal_those_on_gloo(ranks):
    expected = ([[0.5] * 3] * 2, 1.0, [[0.0] * 2, [1.0] * 2])
    assert ranks(2, _compare) == [(True, expected)] * 2
