"""`[data]`, `[train]`, `[plan]` and `[cluster]`: frozen schemas whose defaults are those of a first run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from plait.config.model import Count, PathText, Positive, Reference, Section

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # TOML has arrays only


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)]
Files = Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple)]


class Data(Section):
    """Where samples come from: a name, or a user's function.

    `seq_len` (tokens) is for language models, `num_samples` and `image_size` for random data; `seed` None is that of
    `[train]`.
    """

    name: Literal["stdlib", "text", "digits", "random"] | None = None
    python: Reference | None = None
    seq_len: Count | None = None
    files: Files | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    num_samples: Count | None = None
    image_size: Count | None = None


class Train(Section):
    """How to train. `global_batch`: samples a step, over all ranks and micro-batches; `checkpoint_every` 0: at the end.

    `clip_grad_norm` None does not clip; `loss` is a user's `module:function` of (output, targets).
    `num_servers` and `aggregate` are for parameter servers: how many ranks serve (None: all) and whether the workers'
    gradients are summed to the global mean loss or averaged worker by worker.
    """

    steps: Count = 100
    global_batch: Count = 16
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: NonNegative = 0.0
    clip_grad_norm: Positive | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    loss: Reference | None = None
    num_servers: Count | None = None
    aggregate: Literal["sum", "mean"] = "sum"


class PlanSection(Section):
    """The plan's text, or `auto` for the planner's choice.

    Where a pipeline cuts the model: `counts` of layers, one a stage, or `splits`, the layer that begins each later stage;
    without either, balanced.
    """

    text: str = "dp1"
    counts: Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)] | None = None
    splits: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None


class ClusterSection(Section):
    """`PRESETxCOUNT`, the path of a cluster file, or `local`."""

    name: str = "local"
