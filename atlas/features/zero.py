"""DeepSpeed's ZeRO 0 to 3 with its options, and its pipeline, one feature at a time."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import make, share

PACKAGE = "deepspeed"
TITLE = "DeepSpeed"
FRESH = True
CLIP = 0.1
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def settings_of(stage, accumulate, clipping, **more):
    zero = {"stage": stage, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 4 // accumulate,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **more,
    }


def engine(stage, accumulate=1, clipping=0.0, groups=None, **more):
    """A prepare: the model in an engine."""

    def prepare(model):
        own = [one for one in model.parameters() if one.requires_grad]
        optimizer = adamw(own if groups is None else groups(model))
        settings = settings_of(stage, accumulate, clipping, **more)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    return prepare


def two_groups(model):
    norms = [one for one in model.parameters() if one.ndim == 1]
    rest = [one for one in model.parameters() if one.ndim > 1]
    return [{"params": rest, "weight_decay": 0.1}, {"params": norms, "lr": 1e-3}]


def everything(model):
    """All parameters, those without gradients too."""
    return list(model.parameters())


def accumulated(parts):
    """A step of so many micro-batches, which DeepSpeed counts."""

    def step(state, batch, loss):
        inputs, targets = share(batch)
        for one, other in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            state.backward(loss(state(one), other))
            state.step()

    return step


once = accumulated(1)
twice = accumulated(2)


def in_bf16(state, batch, loss):
    """Two micro-batches of a model in bf16."""
    inputs, targets = share(batch)
    for one, other in zip(inputs.bfloat16().chunk(2), targets.chunk(2), strict=True):
        state.backward(loss(state(one).float(), other))
        state.step()


def without_sync(state, batch, loss):
    """Micro-batches under no_sync(), the last outside."""
    inputs, targets = (part.chunk(2) for part in share(batch))
    with state.no_sync():
        state.backward(loss(state(inputs[0]), targets[0]) / 2)
    state.backward(loss(state(inputs[1]), targets[1]) / 2)
    state.step()


def marked(state, batch, loss):
    """Accumulation by the loop, which says where it ends."""
    inputs, targets = (part.chunk(2) for part in share(batch))
    for number in range(2):
        state.set_gradient_accumulation_boundary(number == 1)
        state.backward(loss(state(inputs[number]), targets[number]) / 2)
    state.step()


def unmanaged(state, batch, loss):
    """Accumulation by the loop, which the configuration leaves to it."""
    inputs, targets = (part.chunk(2) for part in share(batch))
    for number in range(2):
        state.backward(loss(state(inputs[number]), targets[number]) / 2)
    state.step()


def two_forwards(state, batch, loss):
    """Two forwards, then one backward of both."""
    inputs, targets = (part.chunk(2) for part in share(batch))
    state.backward(sum(loss(state(inputs[one]), targets[one]) / 2 for one in range(2)))
    state.step()


def plain_backward(state, batch, loss):
    """The loss's own backward(), and engine.step()."""
    inputs, targets = share(batch)
    loss(state(inputs), targets).backward()
    state.step()


def evaluated(state, batch, loss):
    """An evaluation between two micro-batches."""
    inputs, targets = (part.chunk(2) for part in share(batch))
    for number in range(2):
        state.backward(loss(state(inputs[number]), targets[number]))
        state.step()
        if number == 0:
            state.eval()
            with torch.no_grad():
                state(inputs[1])
            state.train()


def coalesced(state, batch, loss):
    """Two backwards that are reduced together."""
    inputs, targets = (part.chunk(2) for part in share(batch))
    with state.coalesce_grad_reduction():
        for number in range(2):
            state.backward(loss(state(inputs[number]), targets[number]) / 2)
    state.step()


class Checkpointed(models.Net):
    """Blocks that run again in the backward, by DeepSpeed's own function."""

    def forward(self, x):
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x.requires_grad_())
        return self.head(x)


def make_checkpointed():
    torch.manual_seed(0)
    return models.vectors(Checkpointed())


def layers_of(model):
    return [*model.blocks, model.head]


def pipeline(accumulate=4, clipping=0.0, stages=2, **more):
    """A prepare: the model's blocks and head on two stages."""

    def prepare(model):
        deepspeed.init_distributed()
        ranks = dist.get_world_size() // stages
        settings = settings_of(0, accumulate, clipping)
        settings["train_micro_batch_size_per_gpu"] = 8 // ranks // accumulate
        settings |= more.get("settings", {})
        parts = PipelineModule(
            layers=layers_of(model),
            num_stages=stages,
            loss_fn=F.cross_entropy,
            partition_method="uniform",
            activation_checkpoint_interval=more.get("interval", 0),
        )
        own = [one for one in parts.parameters() if one.requires_grad]
        return deepspeed.initialize(model=parts, optimizer=adamw(own), config=settings)[0]

    return prepare


class Table(nn.Module):
    """The model's table, made by a specification of layers."""

    def __init__(self, given):
        super().__init__()
        self.weight = given[0].weight

    def forward(self, x):
        return F.embedding(x, self.weight)


def times(part, x):
    return F.linear(x, part.weight)


def tied_pipeline(model):
    """A table that the first stage looks up and the last multiplies with."""
    deepspeed.init_distributed()
    given = [model.table]  # in a list, as arguments that are modules are not copied
    layers = [
        TiedLayerSpec("table", Table, given),
        *model.blocks,
        model.norm,
        TiedLayerSpec("table", Table, given, forward_fn=times),
    ]
    parts = PipelineModule(
        layers=layers,
        num_stages=2,
        loss_fn=models.token_loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    settings = settings_of(0, 4, 0.0)
    settings["train_micro_batch_size_per_gpu"] = 2
    own = [one for one in parts.parameters() if one.requires_grad]
    return deepspeed.initialize(model=parts, optimizer=adamw(own), config=settings)[0]


def through(accumulate=4):
    """A step of the pipeline; a data rank has its share of the samples."""

    def step(state, batch, loss):
        ranks, own = state.grid.get_data_parallel_world_size(), state.grid.get_data_parallel_rank()
        inputs, targets = (part.chunk(ranks)[own].chunk(accumulate) for part in batch)
        state.train_batch(zip(inputs, targets, strict=True))

    return step


class Sometimes(models.Net):
    """A layer that every second forward uses."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(models.WIDTH, models.CLASSES)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        out = super().forward(x)
        return out + self.extra(x) if self.calls % 2 else out


def make_sometimes():
    torch.manual_seed(0)
    return models.vectors(Sometimes())


BF16 = {"bf16": {"enabled": True}}
UNMANAGED = {"managed_gradient_accumulation": False}


def feature(name, prepare, step=once, make=make, nproc=2, expected="equal"):
    return Feature(name, make, prepare, step, nproc, "float32", expected)


def of_stage(stage):
    """Features that every stage of ZeRO has."""
    zero = f"ZeRO {stage}"
    no_sync = "equal" if stage < 2 else "incompatible"
    scaled = "equal" if stage < 2 else "not yet supported"
    return [
        feature(zero, engine(stage)),
        feature(f"{zero}, accumulation", engine(stage, 2), twice),
        feature(f"{zero}, clipping", engine(stage, clipping=CLIP)),
        feature(f"{zero}, clipping, accumulation", engine(stage, 2, CLIP), twice),
        feature(f"{zero}, no_sync", engine(stage), without_sync, expected=no_sync),
        feature(f"{zero}, set_gradient_accumulation_boundary", engine(stage), marked),
        feature(f"{zero}, unmanaged accumulation", engine(stage, **UNMANAGED), unmanaged),
        feature(f"{zero}, two forwards, one backward", engine(stage), two_forwards),
        feature(
            f"{zero}, loss.backward()",
            engine(stage),
            plain_backward,
            expected="equal" if stage else "not supported",
        ),
        feature(f"{zero}, an evaluation between", engine(stage, 2), evaluated),
        feature(f"{zero}, frozen parameters", engine(stage), make=models.make_frozen),
        feature(
            f"{zero}, frozen parameters in the optimizer",
            engine(stage, groups=everything),
            make=models.make_frozen,
        ),
        feature(f"{zero}, tied weights", engine(stage, 2), twice, models.make_tied),
        feature(
            f"{zero}, unused parameters",
            engine(stage, 2),
            twice,
            models.make_unused,
            expected="moved, which no gradient asks for",
        ),
        feature(
            f"{zero}, a layer of every second step",
            engine(stage),
            once,
            make_sometimes,
            expected="not equal",
        ),
        feature(f"{zero}, a block that runs twice", engine(stage, 2), twice, models.make_twice),
        feature(f"{zero}, two groups", engine(stage, 2, CLIP, two_groups), twice),
        feature(
            f"{zero}, prescale_gradients",
            engine(stage, 2, prescale_gradients=True),
            twice,
            expected=scaled,
        ),
        feature(
            f"{zero}, gradient_predivide_factor",
            engine(stage, prescale_gradients=True, gradient_predivide_factor=4.0),
            expected=scaled,
        ),
        feature(f"{zero}, recomputed blocks", engine(stage, 2), twice, make_checkpointed),
        feature(f"{zero}, bf16", engine(stage, 2, **BF16), in_bf16, expected=""),
    ]


FEATURES = [
    *(one for stage in range(4) for one in of_stage(stage)),
    *(
        feature(
            f"ZeRO {stage}, {key}={value}",
            engine(stage, 2, CLIP, zero={key: value}),
            twice,
            expected="" if key == "round_robin_gradients" else "equal",
        )
        for stage, key, value in (
            (1, "reduce_scatter", False),
            (2, "reduce_scatter", False),
            (1, "overlap_comm", True),
            (2, "overlap_comm", True),
            (3, "overlap_comm", True),
            (2, "contiguous_gradients", False),
            (3, "contiguous_gradients", False),
            (1, "round_robin_gradients", True),
            (2, "round_robin_gradients", True),
            (2, "reduce_bucket_size", 16),
            (3, "reduce_bucket_size", 512),
            (2, "allgather_partitions", False),
            (2, "allgather_bucket_size", 16),
            (3, "stage3_param_persistence_threshold", 0),
            (3, "stage3_max_live_parameters", 0),
            (3, "stage3_prefetch_bucket_size", 0),
            (2, "ignore_unused_parameters", False),
        )
    ),
    *(
        feature(f"ZeRO {stage}, coalesce_grad_reduction", engine(stage), coalesced)
        for stage in (1, 2, 3)
    ),
    feature("pipeline", pipeline(), through()),
    feature("pipeline, ZeRO 1", pipeline(settings={"zero_optimization": {"stage": 1}}), through()),
    feature("pipeline, clipping", pipeline(clipping=CLIP), through(), expected="clip"),
    feature("pipeline, recomputed", pipeline(interval=1), through()),
    feature("pipeline, one micro-batch", pipeline(1), through(1)),
    feature("pipeline, tied table", tied_pipeline, through(), models.make_tied),
    feature("pipeline, frozen parameters", pipeline(), through(), models.make_frozen),
    feature("pipeline, two data ranks", pipeline(2), through(2), nproc=4),
    feature(
        "pipeline, two data ranks, clipping",
        pipeline(2, CLIP),
        through(2),
        nproc=4,
        expected="clip",
    ),
]
