"""DistributedDataParallel's options, one at a time."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import adamw, make, of_shares, share

PACKAGE = "torch"
TITLE = "torch DDP"


def wrapped(**options):
    def prepare(model):
        model = DistributedDataParallel(model, **options)
        return model, adamw(model)

    return prepare


def with_hook(hook, state=None):
    def prepare(model):
        model = DistributedDataParallel(model)
        model.register_comm_hook(state, hook)
        return model, adamw(model)

    return prepare


def hooked_module(model):
    model, optimizer = wrapped()(model)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model, optimizer


def zero(**options):
    def prepare(model):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, eps=1e-5, **options
        )
        return model, optimizer

    return prepare


class Recomputed(models.Net):
    """Blocks that run again in the backward."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Reentrant(models.Net):
    """Blocks that run again in the backward, by the older way."""

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def make_recomputed():
    torch.manual_seed(0)
    return models.vectors(Recomputed())


def make_reentrant():
    torch.manual_seed(0)
    return models.vectors(Reentrant())


def no_sync(state, batch, loss):
    model, optimizer = state
    inputs, targets = share(batch)
    for number in range(4):
        model.require_backward_grad_sync = number == 3
        part = loss(model(inputs.chunk(4)[number]), targets.chunk(4)[number])
        (part / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeros_kept(state, batch, loss):
    """Gradients are set to zero, where they are views of buckets."""
    model, optimizer = state
    optimizer.zero_grad(set_to_none=False)
    inputs, targets = share(batch)
    loss(model(inputs), targets).backward()
    optimizer.step()


def two_forwards(state, batch, loss):
    """Two forwards, then one backward of both."""
    model, optimizer = state
    inputs, targets = share(batch)
    halves = zip(inputs.chunk(2), targets.chunk(2), strict=True)
    sum(loss(model(one), other) / 2 for one, other in halves).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_backwards(state, batch, loss):
    """A backward of each half, both reduced."""
    model, optimizer = state
    inputs, targets = share(batch)
    for one, other in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        (loss(model(one), other) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def joined(**options):
    """A loop in which the second rank has one batch less."""

    def train(state, batches, loss):
        model, optimizer = state
        own = [tuple(share(batch)) for batch in batches]
        own = own[: len(own) - dist.get_rank()]
        with model.join(**options):
            for inputs, targets in own:
                loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    return train


def twice_wrapped(model):
    """Each block and the head in a wrapper of its own."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = DistributedDataParallel(block)
    model.head = DistributedDataParallel(model.head)
    return model, adamw(model)


def synchronized(model):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return wrapped()(model)


class Normed(nn.Module):
    """A batch norm between two layers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(models.WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, models.CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.up(x))))


def make_normed():
    torch.manual_seed(0)
    return models.vectors(Normed())


def local_step(state, batch, loss):
    """The gradients of this rank alone, then parameters are averaged: local SGD of one step."""
    model, optimizer = state
    inputs, targets = share(batch)
    with model.no_sync():
        loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    for one in model.parameters():
        dist.all_reduce(one.data, op=dist.ReduceOp.SUM)
        one.data /= dist.get_world_size()


FEATURES = [
    Feature("DistributedDataParallel", make, wrapped(), of_shares),
    Feature("no_sync", make, wrapped(), no_sync),
    Feature("no_sync, static_graph=True", make, wrapped(static_graph=True), no_sync, expected=""),
    Feature("static_graph=True", make, wrapped(static_graph=True), of_shares),
    Feature(
        "static_graph=True, reentrant checkpoint",
        make_reentrant,
        wrapped(static_graph=True),
        of_shares,
    ),
    Feature("checkpoint without reentry", make_recomputed, wrapped(), of_shares),
    Feature("gradient_as_bucket_view", make, wrapped(gradient_as_bucket_view=True), of_shares),
    Feature(
        "gradient_as_bucket_view, zero_grad to zeros",
        make,
        wrapped(gradient_as_bucket_view=True),
        zeros_kept,
    ),
    Feature(
        "gradient_as_bucket_view, no_sync", make, wrapped(gradient_as_bucket_view=True), no_sync
    ),
    Feature(
        "find_unused_parameters",
        models.make_unused,
        wrapped(find_unused_parameters=True),
        of_shares,
    ),
    Feature(
        "find_unused_parameters, no_sync",
        models.make_unused,
        wrapped(find_unused_parameters=True),
        no_sync,
    ),
    Feature("static_graph=True, unused", models.make_unused, wrapped(static_graph=True), of_shares),
    Feature("small buckets", make, wrapped(bucket_cap_mb=0.0002), of_shares),
    Feature("no broadcast of buffers", make, wrapped(broadcast_buffers=False), of_shares),
    Feature(
        "skip_all_reduce_unused_params",
        models.make_unused,
        wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True),
        of_shares,
    ),
    Feature("tied weights", models.make_tied, wrapped(), of_shares),
    Feature("frozen parameters", models.make_frozen, wrapped(), of_shares),
    Feature("a block that runs twice", models.make_twice, wrapped(), of_shares),
    Feature("two forwards, one backward", make, wrapped(), two_forwards),
    Feature("two backwards, both reduced", make, wrapped(), two_backwards),
    Feature("two wrappers", make, twice_wrapped, of_shares),
    Feature("allreduce_hook", make, with_hook(default_hooks.allreduce_hook), of_shares),
    Feature("built-in comm hook", make, hooked_module, of_shares),
    Feature("allreduce_hook, no_sync", make, with_hook(default_hooks.allreduce_hook), no_sync),
    Feature("ZeroRedundancyOptimizer", make, zero(), of_shares),
    Feature(
        "ZeroRedundancyOptimizer, parameters_as_bucket_view",
        make,
        zero(parameters_as_bucket_view=True),
        of_shares,
    ),
    Feature("join, uneven inputs", make, wrapped(), joined(), expected=""),
    Feature("SyncBatchNorm", make_normed, synchronized, of_shares, expected=""),
    Feature("local SGD of one step", make, wrapped(), local_step, expected=""),
]
