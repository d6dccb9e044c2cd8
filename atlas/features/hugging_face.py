"""Accelerate's options, one feature at a time: steps, and loops with its loaders."""

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    skip_first_batches,
)
from accelerate import FullyShardedDataParallelPlugin as Sharding
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType, GradientAccumulationPlugin
from torch.utils.data import DataLoader, TensorDataset

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import make, share

PACKAGE = "accelerate"
TITLE = "Accelerate"
FRESH = True
CLIP = 0.1


def adamw(model):
    own = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(own, lr=1e-2, eps=1e-5)


def prepared(**options):
    """A prepare: the accelerator with the model and its optimizer."""

    def prepare(model):
        accelerator = Accelerator(cpu=True, **options)
        model, optimizer = accelerator.prepare(model, adamw(model))
        return accelerator, model, optimizer

    return prepare


def ddp(**options):
    return prepared(kwargs_handlers=[DistributedDataParallelKwargs(**options)])


def accumulating(steps, **options):
    plugin = GradientAccumulationPlugin(num_steps=steps, **options)
    return prepared(gradient_accumulation_plugin=plugin)


def step_of(parts=1, clip=None):
    """A step of so many micro-batches under accumulate()."""

    def step(state, batch, loss):
        accelerator, model, optimizer = state
        inputs, targets = share(batch)
        for one, other in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(one), other))
                if clip is not None and accelerator.sync_gradients:
                    clip(accelerator, model)
                optimizer.step()
                optimizer.zero_grad()

    return step


def by_norm(accelerator, model):
    accelerator.clip_grad_norm_(model.parameters(), CLIP)


def without_sync(state, batch, loss):
    accelerator, model, optimizer = state
    inputs, targets = (part.chunk(2) for part in share(batch))
    with accelerator.no_sync(model):
        accelerator.backward(loss(model(inputs[0]), targets[0]) / 2)
    accelerator.backward(loss(model(inputs[1]), targets[1]) / 2)
    optimizer.step()
    optimizer.zero_grad()


def triggered(state, batch, loss):
    """Two forwards under no_sync, whose backwards are synchronized afterwards."""
    accelerator, model, optimizer = state
    inputs, targets = (part.chunk(2) for part in share(batch))
    with accelerator.no_sync(model):
        first = loss(model(inputs[0]), targets[0]) / 2
        second = loss(model(inputs[1]), targets[1]) / 2
        accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    optimizer.zero_grad()


def in_autocast(state, batch, loss):
    accelerator, model, optimizer = state
    inputs, targets = share(batch)
    with accelerator.autocast():
        value = loss(model(inputs), targets)
    accelerator.backward(value)
    optimizer.step()
    optimizer.zero_grad()


def local_sgd(state, batch, loss):
    accelerator, model, optimizer = state
    inputs, targets = share(batch)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1) as local:
        accelerator.backward(loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        local.step()


class Two(torch.nn.Module):
    """Two parts that are prepared one by one."""

    def __init__(self):
        super().__init__()
        self.first = models.Block()
        self.second = torch.nn.Linear(models.WIDTH, models.CLASSES)

    def forward(self, x):
        return self.second(self.first(x))


def make_two():
    torch.manual_seed(0)
    return models.vectors(Two())


def prepare_two(model):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(adamw(model))
    return accelerator, accelerator.prepare(model.first, model.second), optimizer


def step_of_two(state, batch, loss):
    accelerator, parts, optimizer = state
    inputs, targets = share(batch)
    for one, other in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        with accelerator.accumulate(*parts):
            accelerator.backward(loss(parts[1](parts[0](one)), other))
            optimizer.step()
            optimizer.zero_grad()


def loop(size=2, accumulate=1, samples=None, shuffle=False, joined=False, skip=0, **options):
    """A loop over a prepared loader, batches of `size` a rank (or in all, with split_batches)."""

    def train(model, batches, loss):
        whole = [torch.cat(parts)[:samples] for parts in zip(*batches, strict=True)]
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(**options),
        )
        torch.manual_seed(7)
        loader = DataLoader(TensorDataset(*whole), batch_size=size, shuffle=shuffle)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
        rest = skip_first_batches(loader, skip) if skip else ()
        rounds = [(loader, skip or None), (rest, None)]
        if joined:
            with accelerator.join_uneven_inputs([model], even_batches=False):
                epochs(accelerator, model, optimizer, rounds, loss)
        else:
            epochs(accelerator, model, optimizer, rounds, loss)

    return train


def epochs(accelerator, model, optimizer, rounds, loss):
    for loader, end in rounds:
        for number, (inputs, targets) in enumerate(loader):
            if end is not None and number == end:
                break
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


def sharded(accumulate=1, clipping=None):
    """FSDP2 by Accelerate's plugin."""

    def prepare(model):
        plugin = Sharding(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_offload=False)
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate
        )
        model, optimizer = accelerator.prepare(model, adamw(model))
        return accelerator, model, optimizer

    return prepare


def feature(name, prepare, step, make=make, nproc=2, dtype="float64", expected="equal"):
    return Feature(name, make, prepare, step, nproc, dtype, expected)


def loops(name, expected="equal", **options):
    return Feature(name, make, None, loop(**options), expected=expected)


HOOK = DDPCommunicationHookType
FEATURES = [
    feature("prepare", prepared(), step_of()),
    feature("accumulate", accumulating(2), step_of(2)),
    feature("accumulate, four", accumulating(4), step_of(4)),
    feature("sync_each_batch", accumulating(2, sync_each_batch=True), step_of(2)),
    feature("sync_with_dataloader=False", accumulating(2, sync_with_dataloader=False), step_of(2)),
    feature("clip_grad_norm_", prepared(), step_of(1, by_norm)),
    feature("clip_grad_norm_, accumulate", accumulating(2), step_of(2, by_norm)),
    feature(
        "clip_grad_norm_, sync_each_batch",
        accumulating(2, sync_each_batch=True),
        step_of(2, by_norm),
    ),
    feature("no_sync", prepared(), without_sync),
    feature("trigger_sync_in_backward", prepared(), triggered),
    feature("two models under accumulate", prepare_two, step_of_two, make_two),
    feature("tied weights", accumulating(2), step_of(2), models.make_tied),
    feature("frozen parameters", accumulating(2), step_of(2), models.make_frozen),
    feature(
        "find_unused_parameters",
        ddp(find_unused_parameters=True),
        step_of(),
        models.make_unused,
    ),
    feature("static_graph", ddp(static_graph=True), step_of(), models.make_twice),
    feature("gradient_as_bucket_view", ddp(gradient_as_bucket_view=True), step_of()),
    feature("bucket_cap_mb", ddp(bucket_cap_mb=1e-4), step_of()),
    feature("comm_hook=FP16", ddp(comm_hook=HOOK.FP16), step_of(), dtype="float32", expected=""),
    feature("comm_hook=BF16", ddp(comm_hook=HOOK.BF16), step_of(), dtype="float32", expected=""),
    feature(
        "comm_hook=POWER_SGD",
        ddp(comm_hook=HOOK.POWER_SGD),
        step_of(),
        dtype="float32",
        expected="",
    ),
    feature(
        "mixed_precision=bf16",
        prepared(mixed_precision="bf16"),
        in_autocast,
        dtype="float32",
        expected="",
    ),
    feature("autocast, no mixed precision", prepared(), in_autocast),
    feature("LocalSGD of one step", prepared(), local_sgd, expected=""),
    feature("FSDP2", sharded(), step_of(), expected=""),
    feature("FSDP2, accumulate", sharded(2), step_of(2), expected=""),
    loops("loader"),
    loops("loader, shuffled", shuffle=True),
    loops("loader, use_seedable_sampler", shuffle=True, use_seedable_sampler=True),
    loops("loader, split_batches", size=4, split_batches=True),
    loops("loader, dispatch_batches", dispatch_batches=True),
    loops(
        "loader, dispatch_batches, split_batches", size=4, dispatch_batches=True, split_batches=True
    ),
    loops("loader, accumulate", accumulate=2),
    loops("loader, accumulate, last window of one", accumulate=3, expected=""),
    loops("loader, even_batches, 14 samples", samples=14, expected=""),
    loops("loader, even_batches, 13 samples", samples=13, expected=""),
    loops("loader, dispatch_batches, 14 samples", samples=14, dispatch_batches=True, expected=""),
    loops("loader, even_batches=False, 14 samples", samples=14, even_batches=False, expected=""),
    loops("join_uneven_inputs, 14 samples", samples=14, joined=True, expected=""),
    loops("skip_first_batches", skip=2),
    loops("skip_first_batches, shuffled", skip=2, shuffle=True, use_seedable_sampler=True),
    loops("non_blocking", non_blocking=True),
    loops("use_stateful_dataloader", use_stateful_dataloader=True, expected=""),
]
