"""Lightning Fabric's strategies and options, one feature at a time."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import make, share

PACKAGE = "lightning"
TITLE = "Lightning Fabric"
FRESH = True
CLIP = 0.1


def adamw(model):
    own = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(own, lr=1e-2, eps=1e-5)


def fabric_of(strategy="ddp", **options):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    return fabric


def prepared(strategy="ddp", **options):
    """A prepare: the fabric, and the model with its optimizer by one setup()."""

    def prepare(model):
        fabric = fabric_of(strategy() if callable(strategy) else strategy, **options)
        model, optimizer = fabric.setup(model, adamw(model))
        return fabric, model, optimizer

    return prepare


def prepared_apart(strategy="ddp", **options):
    """A prepare: the model by setup_module(), then the optimizer."""

    def prepare(model):
        fabric = fabric_of(strategy() if callable(strategy) else strategy, **options)
        model = fabric.setup_module(model)
        return fabric, model, fabric.setup_optimizers(adamw(model))

    return prepare


def ddp(**options):
    return prepared(lambda: DDPStrategy(**options))


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def split(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def fsdp2(**options):
    def strategy():
        return ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)

    return prepared_apart(strategy, **options)


def tensors(**options):
    def strategy():
        return ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)

    return prepared_apart(strategy, **options)


def step_of(parts=1, sync="as told", given=share, **clip):
    """A step of so many micro-batches; no_backward_sync in all but the last."""

    def step(state, batch, loss):
        fabric, model, optimizer = state
        inputs, targets = given(batch)
        for number in range(parts):
            pause = sync == "as told" and number < parts - 1
            with fabric.no_backward_sync(model, enabled=pause):
                value = loss(model(inputs.chunk(parts)[number]), targets.chunk(parts)[number])
                fabric.backward(value / parts)
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def all_of(batch):
    return batch


def two_forwards(state, batch, loss):
    """Two forwards, then one backward of both."""
    fabric, model, optimizer = state
    inputs, targets = (part.chunk(2) for part in share(batch))
    fabric.backward(sum(loss(model(inputs[one]), targets[one]) / 2 for one in range(2)))
    optimizer.step()
    optimizer.zero_grad()


def evaluated(state, batch, loss):
    """An evaluation between two micro-batches."""
    fabric, model, optimizer = state
    inputs, targets = (part.chunk(2) for part in share(batch))
    for number in range(2):
        with fabric.no_backward_sync(model, enabled=number == 0):
            fabric.backward(loss(model(inputs[number]), targets[number]) / 2)
        model.eval()
        with torch.no_grad():
            model(inputs[1])
        model.train()
    optimizer.step()
    optimizer.zero_grad()


class Other(models.Net):
    """A forward of another name, which Fabric leads through the wrapper."""

    def training_loss(self, x, targets):
        return torch.nn.functional.cross_entropy(self(x), targets)


def make_other():
    torch.manual_seed(0)
    return models.vectors(Other())


def prepare_marked(model):
    fabric = fabric_of()
    wrapped = fabric.setup_module(model)
    wrapped.mark_forward_method("training_loss")
    return fabric, wrapped, fabric.setup_optimizers(adamw(wrapped))


def by_other_name(state, batch, loss):
    fabric, model, optimizer = state
    fabric.backward(model.training_loss(*share(batch)))
    optimizer.step()
    optimizer.zero_grad()


class Two(torch.nn.Module):
    """Two parts that are set up one by one."""

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
    fabric = fabric_of()
    parts = [fabric.setup_module(model.first), fabric.setup_module(model.second)]
    return fabric, parts, fabric.setup_optimizers(adamw(model))


def step_of_two(state, batch, loss):
    fabric, (first, second), optimizer = state
    inputs, targets = (part.chunk(2) for part in share(batch))
    for number in range(2):
        pause = number == 0
        with fabric.no_backward_sync(first, pause), fabric.no_backward_sync(second, pause):
            fabric.backward(loss(second(first(inputs[number])), targets[number]) / 2)
    optimizer.step()
    optimizer.zero_grad()


def loop(samples=None, shuffle=False, drop_last=False, **options):
    """A loop over a loader of Fabric's."""

    def train(model, batches, loss):
        whole = [torch.cat(parts)[:samples] for parts in zip(*batches, strict=True)]
        fabric = fabric_of()
        fabric.seed_everything(7, verbose=False)
        loader = DataLoader(
            TensorDataset(*whole), batch_size=2, shuffle=shuffle, drop_last=drop_last
        )
        model, optimizer = fabric.setup(model, adamw(model))
        for inputs, targets in fabric.setup_dataloaders(loader, **options):
            fabric.backward(loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    return train


def feature(name, prepare, step=None, make=make, dtype="float64", expected="equal"):
    return Feature(name, make, prepare, step or step_of(), 2, dtype, expected)


def loops(name, expected="equal", **options):
    return Feature(name, make, None, loop(**options), expected=expected)


FEATURES = [
    feature("ddp", prepared()),
    feature("ddp, setup_module, setup_optimizers", prepared_apart()),
    feature("ddp, no_backward_sync", prepared(), step_of(2)),
    feature("ddp, each backward reduced", prepared(), step_of(2, "always")),
    feature("ddp, clip_gradients(max_norm)", prepared(), step_of(2, max_norm=CLIP)),
    feature("ddp, two forwards, one backward", prepared(), two_forwards),
    feature("ddp, an evaluation between", prepared(), evaluated),
    feature("ddp, mark_forward_method", prepare_marked, by_other_name, make_other),
    feature("ddp, two modules", prepare_two, step_of_two, make_two),
    feature("ddp, tied weights", prepared(), step_of(2), models.make_tied),
    feature("ddp, frozen parameters", prepared(), step_of(2), models.make_frozen),
    feature("ddp, a block that runs twice", prepared(), step_of(2), models.make_twice),
    feature(
        "ddp_find_unused_parameters_true",
        prepared("ddp_find_unused_parameters_true"),
        step_of(2),
        models.make_unused,
    ),
    feature("ddp, static_graph", ddp(static_graph=True), step_of(), models.make_twice),
    feature("ddp, gradient_as_bucket_view", ddp(gradient_as_bucket_view=True), step_of(2)),
    feature("ddp, bucket_cap_mb", ddp(bucket_cap_mb=1e-4), step_of(2)),
    feature("ddp, 64-true", prepared(precision="64-true"), step_of(2)),
    feature("ddp, 32-true", prepared(precision="32-true"), step_of(2), dtype="float32"),
    feature(
        "ddp, bf16-mixed",
        prepared(precision="bf16-mixed"),
        step_of(2),
        dtype="float32",
        expected="",
    ),
    feature(
        "ddp, bf16-true", prepared(precision="bf16-true"), step_of(2), dtype="float32", expected=""
    ),
    feature("fsdp", prepared(FSDPStrategy), expected="only available on GPU"),
    feature("FSDP2", fsdp2()),
    feature("FSDP2, no_backward_sync", fsdp2(), step_of(2)),
    feature("FSDP2, clip_gradients(max_norm)", fsdp2(), step_of(2, max_norm=CLIP)),
    feature("FSDP2, two forwards, one backward", fsdp2(), two_forwards),
    feature("FSDP2, an evaluation between", fsdp2(), evaluated),
    feature("FSDP2, tied weights", fsdp2(), step_of(2), models.make_tied),
    feature("FSDP2, frozen parameters", fsdp2(), step_of(2), models.make_frozen),
    feature("FSDP2, 32-true", fsdp2(precision="32-true"), step_of(2), dtype="float32"),
    feature(
        "FSDP2, bf16-mixed",
        fsdp2(precision="bf16-mixed"),
        step_of(2),
        dtype="float32",
        expected="",
    ),
    feature("tensor parallel", tensors(), step_of(given=all_of)),
    feature("tensor parallel, no_backward_sync", tensors(), step_of(2, given=all_of)),
    feature(
        "tensor parallel, clip_gradients(max_norm)",
        tensors(),
        step_of(2, given=all_of, max_norm=CLIP),
        expected="",
    ),
    loops("loader"),
    loops("loader, shuffled", shuffle=True),
    loops("loader, 14 samples", samples=14, expected=""),
    loops("loader, 13 samples", samples=13, expected=""),
    loops("loader, drop_last, 14 samples", samples=14, drop_last=True, expected=""),
    loops("loader, use_distributed_sampler=False", use_distributed_sampler=False, expected=""),
]
