"""FSDP2's options, one at a time."""

import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import adamw, make, of_shares, share

PACKAGE = "torch"
TITLE = "torch FSDP2"


def sharded(**options):
    """`prepare` with options of `fully_shard`, for blocks and root."""

    def prepare(model):
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model, adamw(model)

    return prepare


def set_up(act, make_options=dict):
    """`prepare` that does something to the sharded model."""

    def prepare(model):
        model, optimizer = sharded(**make_options())(model)
        act(model)
        return model, optimizer

    return prepare


def replicated_too(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(mesh=mesh)(model)


def grouped(model):
    fully_shard(list(model.blocks))
    fully_shard([model.head, model])
    return model, adamw(model)


def recomputed(model):
    for block in model.blocks:
        checkpoint(block)
    return sharded()(model)


def ignoring(model):
    ignored = set(model.head.parameters())
    return sharded(ignored_params=ignored)(model)


def with_ignored(state, batch, loss):
    """Gradients of ignored parameters are the user's to reduce."""
    model, optimizer = state
    inputs, targets = share(batch)
    loss(model(inputs), targets).backward()
    for one in model.head.parameters():
        dist.all_reduce(one.grad)
        one.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


def divided_by_hand(state, batch, loss):
    model, optimizer = state
    inputs, targets = share(batch)
    (loss(model(inputs), targets) / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()


def divide_by_one(model):
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)


def divide_by_one_in_the_root(model):
    model.set_gradient_divide_factor(1.0)


def only_sums(model):
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)


def prefetched(model):
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def accumulated(*, reduced_last=False, kept=False, parts=4):
    """Micro-batches with gradient sync in the last."""

    def step(state, batch, loss):
        model, optimizer = state
        inputs, targets = share(batch)
        for number in range(parts):
            last = number == parts - 1
            if reduced_last:
                model.set_requires_all_reduce(last)
            else:
                model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            if kept:
                model.set_reshard_after_backward(last)
            part = loss(model(inputs.chunk(parts)[number]), targets.chunk(parts)[number])
            (part / parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def unsharded_ahead(state, batch, loss):
    model, _ = state
    handles = [block.unshard(async_op=True) for block in model.blocks]
    handles[0].wait()
    of_shares(state, batch, loss)


def evaluated_between(state, batch, loss):
    model, _ = state
    with torch.no_grad():
        model.eval()
        model(batch[0])
        model.train()
    of_shares(state, batch, loss)


def kept_between(state, batch, loss):
    """The root keeps its parameters over an evaluation with other options."""
    model, _ = state
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(batch[0])
    model.set_reshard_after_forward(True)
    of_shares(state, batch, loss)


POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float64)
COLUMNS = {"shard_placement_fn": lambda one: Shard(one.dim() - 1)}

FEATURES = [
    Feature("fully_shard", make, sharded(), of_shares),
    Feature("reshard_after_forward=False", make, sharded(reshard_after_forward=False), of_shares),
    Feature("reshard_after_forward=2 of 4", make, sharded(reshard_after_forward=2), of_shares, 4),
    Feature("mesh of replicas and shards (HSDP)", make, replicated_too, of_shares, 4),
    Feature("shard_placement_fn: columns", make, sharded(**COLUMNS), of_shares),
    Feature(
        "MixedPrecisionPolicy(reduce_dtype)",
        make,
        sharded(mp_policy=POLICY),
        of_shares,
        dtype="float32",
    ),
    Feature("CPUOffloadPolicy", make, sharded(offload_policy=CPUOffloadPolicy(False)), of_shares),
    Feature("ignored_params, reduced by hand", make, ignoring, with_ignored),
    Feature("a list of modules as one group", make, grouped, of_shares),
    Feature("tied weights", models.make_tied, sharded(), of_shares),
    Feature("frozen parameters", models.make_frozen, sharded(), of_shares),
    Feature("a parameter that no forward uses", models.make_unused, sharded(), of_shares),
    Feature("a block that runs twice", models.make_twice, sharded(), of_shares),
    Feature("activation checkpointing", make, recomputed, of_shares),
    Feature("set_requires_gradient_sync", make, sharded(), accumulated()),
    Feature("set_reshard_after_backward", make, sharded(), accumulated(kept=True)),
    Feature(
        "set_requires_all_reduce, HSDP",
        make,
        replicated_too,
        accumulated(reduced_last=True, parts=2),
        4,
    ),
    Feature("set_gradient_divide_factor", make, set_up(divide_by_one), divided_by_hand),
    Feature(
        "set_gradient_divide_factor on the root alone",
        make,
        set_up(divide_by_one_in_the_root),
        divided_by_hand,
        expected="too small",
    ),
    Feature("set_force_sum_reduction_for_comms", make, set_up(only_sums), of_shares),
    Feature("prefetch by hand", make, set_up(prefetched), of_shares),
    Feature("unshard(async_op=True)", make, sharded(), unsharded_ahead),
    Feature("an evaluation between steps", make, sharded(), evaluated_between),
    Feature("set_reshard_after_forward between steps", make, sharded(), kept_between),
    Feature(
        "set_reduce_scatter_max_input_buffers",
        make,
        set_up(lambda model: model.set_reduce_scatter_max_input_buffers(2)),
        of_shares,
    ),
    Feature(
        "set_reduce_scatter_unused_params",
        models.make_unused,
        set_up(lambda model: model.set_reduce_scatter_unused_params(True)),
        of_shares,
        expected="",
    ),
]
