"""`[data]`, `[train]`, `[plan]` and `[cluster]`: frozen schemas whose defaults are those of a first
run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from plait.config.model import Count, ModelSection, PathText, Positive, Reference, Section

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # TOML has arrays only


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)]
Files = Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple)]


class Data(Section):
    """Where samples come from: a name, or a user's function.

    `seq_len` (tokens) is for language models, `num_samples` and `image_size` for random data;
    `seed` None is that of `[train]`. `packed`: text whose files do not see each other.
    `tokenizer = "bytes"` says that a vocabulary of another size is to be trained on bytes.
    """

    name: Literal["stdlib", "text", "digits", "random"] | None = None
    python: Reference | None = None
    seq_len: Count | None = None
    files: Files | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    num_samples: Count | None = None
    image_size: Count | None = None
    packed: bool = False
    tokenizer: Literal["bytes"] | None = None


class Train(Section):
    """How to train. `global_batch`: samples a step, over all ranks and micro-batches;
    `checkpoint_every` 0: at the end.

    `clip_grad_norm` None does not clip; `loss` is a user's `module:function` of (output, targets).
    `num_servers` and `aggregate` are for parameter servers: how many ranks serve (None: all) and
    whether the workers' gradients are summed to the global mean loss or averaged worker by worker.
    `outer_lr` and `outer_momentum` are of the outer step of `local` (DiLoCo: 0.7 and 0.9),
    `compress` how its differences travel; `staleness_rate` whether `async-server` trusts old
    gradients less: 1, or 1 / (1 + updates missed). `restarts`: how often, in all, a rank that is
    lost is started again while the others go on (`local`, `async-server`). `float16` computes in
    float16 where the plan says float32, with a dynamic scale of the loss and float32 masters.
    `place_experts_every`: steps after which experts are placed anew over the ranks of `ep`, by the
    load seen since (0: they stay); `spare_expert_slots`: of each rank, for copies of the busiest.
    Neither changes what is computed. `grouped_product`: of experts, by rule, by measurement after
    the first step (recorded in the metrics), or by name. `linear_product`: of float32 layers and
    experts on CPUs, by the quicker of torch's two libraries as measured on this machine; `rule`:
    oneDNN for all but small ones; `torch`: as torch itself would.
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
    outer_lr: Positive = 1.0
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    compress: Literal["none", "int8"] = "none"
    staleness_rate: Literal["constant", "inverse"] = "constant"
    restarts: Annotated[int, Field(ge=0)] = 0
    float16: bool = False
    place_experts_every: Annotated[int, Field(ge=0)] = 0
    spare_expert_slots: Annotated[int, Field(ge=0)] = 0
    grouped_product: Literal["rule", "measure", "kernel", "loop", "padded"] = "rule"
    linear_product: Literal["measured", "rule", "torch"] = "measured"


class PlanSection(Section):
    """The plan's text, or `auto` for the planner's choice.

    Where a pipeline cuts the model: `counts` of blocks (or of all layers), one a stage, or
    `splits`, the layer that begins each later stage; without either, balanced: by estimated work,
    or `measure`d on a sample, within `stage_memory_gb`. `schedule`: a text file with the pipeline's schedule, in place of the
    plan's. `weight_grad_group`: under schedules that split backwards, the micro-batches whose
    weight gradients are made at once.
    """

    text: str = "dp1"
    counts: Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)] | None = None
    splits: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    schedule: str | None = None
    weight_grad_group: Count = 1
    measure: bool = False
    stage_memory_gb: Positive | None = None


class ClusterSection(Section):
    """`PRESETxCOUNT`, the path of a cluster file, or `local`.

    `interface`: the network interface that ranks of several machines listen on, and no other
    (None: the one that the machine's name leads to); ranks of one machine listen on loopback alone.
    """

    name: str = "local"
    interface: str | None = None


class Recovery(Section):
    """What is done about ranks that fail.

    `hang_seconds`: how long a rank may be silent while others wait for it, before it counts as
    failed and the run ends.
    """

    hang_seconds: Positive = 300.0


class Federated(Section):
    """A federation: who has which samples, how rounds are run, and what the server makes of the
    clients' changes.

    Clients train by `[train]`: `global_batch` is a client's batch, `local_epochs` its passes over
    its samples in a round; `[plan]` is the plan of one client. `alpha` is of the Dirichlet and
    quantity partitions, `shards_per_client` of shards. `workers`: processes that simulate clients
    (1: this one). `clip` and `noise`: differential privacy, see `plait.outer.federated.privacy`;
    `secure`: secure aggregation. Clients judge the weights every `evaluate_every` rounds. Deployed,
    a round waits `patience_seconds` for the others once `min_replies` clients have answered; and
    with `partition = "own"` all that a client's [data] names is its own, where the others deal one
    data set out.
    """

    clients: Count = 10
    rounds: Count = 10
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_replies: Count = 1
    local_epochs: Count = 1
    partition: Literal["iid", "dirichlet", "shards", "quantity", "own"] = "iid"
    alpha: Positive = 0.5
    shards_per_client: Count = 2
    strategy: Literal[
        "fedavg",
        "fedprox",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "scaffold",
        "trimmed",
        "median",
        "krum",
    ] = "fedavg"
    server_lr: Positive = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    server_betas: Betas = (0.9, 0.99)
    tau: Positive = 1e-3
    mu: NonNegative = 0.1
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    num_bad: Annotated[int, Field(ge=0)] = 1
    secure: bool = False
    clip: Positive | None = None
    noise: NonNegative = 0.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    workers: Count = 1
    evaluate_every: Count = 1
    patience_seconds: Positive = 120.0


@dataclass(frozen=True)
class Sections:
    """All sections of a config, which rules between keys are asked about."""

    model: ModelSection
    data: Data
    train: Train
    plan: PlanSection
    cluster: ClusterSection
    federated: Federated = field(default_factory=Federated)
    recovery: Recovery = field(default_factory=Recovery)
