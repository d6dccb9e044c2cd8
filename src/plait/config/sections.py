"""`[data]`, `[train]`, `[plan]`, `[cluster]`: frozen schemas with the defaults of a first run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from plait.config.adapter import AdapterConfig
from plait.config.model import (
    Count,
    ModelSection,
    PathText,
    Positive,
    Reference,
    Section,
    as_tuple,
)
from plait.plan.axes import BlockRemat
from plait.plan.precisions import Messages

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple)]
Plans = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Steps = Annotated[int, Field(ge=0)]
Files = Annotated[tuple[PathText, ...], BeforeValidator(as_tuple)]
Kept = Annotated[Literal["auto"] | Steps | tuple[Steps, ...], BeforeValidator(as_tuple)]


class DataSource(Section):
    """One source of samples: a name, or a user's function."""

    name: Literal["stdlib", "text", "files", "hf", "digits", "random"] | None = None
    """The built-in source of samples."""
    python: Reference | None = None
    """A user's function `module:function` that returns the data set; with `hf` one of its sets."""
    seq_len: Count | None = None
    """Tokens of a sequence, for language models."""
    files: Files | None = None
    """Paths of the files of data `text` and `files`; of the latter also globs, as "a/*.jsonl"."""
    path: PathText | None = None
    """`hf`: a folder of save_to_disk; with `streaming` whatever load_dataset takes."""
    streaming: bool = False
    """`hf`: whether `path` is read as a stream: a folder of data files, or a set of the hub."""
    subset: str | None = None
    """`hf` with `streaming`: the configuration of a set with several."""
    rows: Count | None = None
    """`hf`: rows that are read at most; a stream without an end needs it."""
    split: str | None = None
    """`hf`: the split of a folder with several; by default train."""
    column: str | None = None
    """`files`, `hf`: the column; by default the first of text, messages, input_ids."""
    document: Literal["line", "file"] = "line"
    """`files`: the document of a text file, a line or the whole."""
    tokenizer: PathText | None = None
    """`files`, `hf`: a tokenizer.json or a saved tokenizer's folder; `bytes` trains on bytes."""
    end_token: str | None = None
    """The token behind each document; by default the end token of a saved tokenizer."""
    samples: Literal["stream", "documents"] | None = None
    """Samples cut from one stream, or a document each; by default so for conversations alone."""
    skip_bad: Annotated[int, Field(ge=0)] = 0
    """`files`, `hf`: rows that may be left out because they cannot be read."""
    cache: PathText | None = None
    """`files`, `hf`: the folder of tokens; by default ~/.cache/plait/tokens."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """The seed of random data; by default that of `[train]`."""
    num_samples: Count | None = None
    """The number of samples of random data."""
    image_size: Count | None = None
    """The side of a random image, in pixels."""
    packed: bool = False
    """Whether sequences of one file see no other file."""
    packing: bool = False
    """Whether documents of tokens are packed into samples, in which none sees another."""


def _as_weights(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,) if _is_number(value) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class MixturePart(DataSource):
    """One source of a mixture. Keys that it has not are those of `[data]`."""

    weight: Annotated[tuple[NonNegative, ...], BeforeValidator(_as_weights)]
    """The share of the source in the mixture; a list where `from_step` has several."""


class Data(DataSource):
    """The source of samples, or several, and the threads that read them."""

    mixture: Annotated[tuple[MixturePart, ...], BeforeValidator(as_tuple)] | None = None
    """Sources, each a table [[data.mixture]] with keys as these and a `weight`."""
    from_step: Annotated[tuple[Steps, ...], BeforeValidator(as_tuple)] | None = None
    """Mixtures: the first step of each weight in the lists of weights, from 0 on."""

    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads of each rank that read batches ahead, two each; 0 reads each when it is needed."""


class ParameterGroup(Section):
    """Parameters with settings of their own. The first group whose pattern fits a name has it."""

    match: str
    """The names of the group: `*` stands for any characters, as in "*.bias" or "embed*"."""
    lr: Positive | None = None
    """The learning rate; by default that of `[train]`, whose schedule scales both."""
    weight_decay: NonNegative | None = None
    """The weight decay; by default that of `[train]`."""
    freeze: bool = False
    """Whether these parameters keep the values that they start with."""


class Train(Section):
    """The training: batch, optimizer and all that a plan does not say."""

    steps: Count = 100
    """Updates in all."""
    global_batch: Count = 16
    """Samples of a step, over all ranks and micro-batches."""
    optimizer: Literal["adamw", "sgd", "muon"] | Reference = "adamw"
    """The optimizer, or a user's function `module:function` of the parameters."""
    lr: Positive = 1e-3
    """The learning rate after the warm-up."""
    betas: Betas = (0.9, 0.999)
    """AdamW: decay of the two running means."""
    eps: Positive = 1e-8
    """AdamW: the number that is added to the denominator."""
    weight_decay: NonNegative = 0.0
    """The factor of decoupled weight decay (AdamW), or of the L2 term (SGD)."""
    no_decay: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    """Parts of names of parameters without weight decay, as ["norm", "bias"]."""
    groups: Annotated[tuple[ParameterGroup, ...], BeforeValidator(as_tuple)] = ()
    """Settings of parameters by name, each a table [[train.groups]] with a pattern `match`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD: the momentum."""
    nesterov: bool = False
    """SGD: whether the momentum is Nesterov's."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The course of the learning rate after the warm-up."""
    min_lr: NonNegative = 0.0
    """The learning rate at the end of the schedule."""
    clip_grad_norm: Positive | None = None
    """The largest global norm of the gradient; without it nothing is clipped."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of weights, data order and dropout."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two checkpoints; 0 saves at the end alone."""
    loss: Reference | None = None
    """A user's loss `module:function` of (output, targets)."""
    num_servers: Count | None = None
    """Parameter servers: the ranks that serve; by default all of them."""
    aggregate: Literal["sum", "mean"] = "sum"
    """Parameter servers: sum to the global mean loss, or average the workers."""
    outer_lr: Positive = 1.0
    """`local`: learning rate of the outer step (DiLoCo: 0.7)."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`local`: Nesterov momentum of the outer step (DiLoCo: 0.9)."""
    compress: Literal["none", "int8"] = "none"
    """`local`: the form in which differences travel."""
    messages: Messages = "whole"
    """`bf16` rounds activations that travel between pipeline stages and tensor ranks."""
    staleness_rate: Literal["constant", "inverse"] = "constant"
    """`async-server`: factor on old gradients: 1, or 1 / (1 + updates missed)."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of lost ranks in all, while others go on (`local`, `async-server`)."""
    float16: bool = False
    """Whether float32 plans compute in float16, with a dynamic loss scale."""
    place_experts_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two placements of experts by their load; 0 never moves them."""
    spare_expert_slots: Annotated[int, Field(ge=0)] = 0
    """Slots of each rank for copies of the busiest experts."""
    grouped_product: Literal["rule", "measure", "kernel", "loop", "padded"] = "rule"
    """Products of experts: by rule, by measurement after the first step, or by name."""
    linear_product: Literal["measured", "rule", "torch"] = "measured"
    """float32 products on CPUs: the library measured as faster, by rule, or torch's."""
    deterministic: bool = False
    """Whether torch may use deterministic algorithms alone; those that have none are errors."""
    fixed_order: bool = False
    """Whether sums over micro-batches and ranks follow one tree, for equal bits under any dp."""
    cuda_graphs: bool = False
    """Whether one rank on a GPU launches all kernels before the update as one CUDA graph."""


class PlanSection(Section):
    """The plan and the cut of a pipeline, which is balanced by work where no key says it."""

    text: str = "dp1"
    """The plan, or `auto` for the choice of the planner."""
    counts: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] | None = None
    """Layers of each pipeline stage."""
    shares: Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)] | None = None
    """Parts of the global batch by data rank, in any numbers, as [3, 1]; equal by default."""
    remat: Annotated[tuple[BlockRemat, ...], BeforeValidator(as_tuple)] | None = None
    """Recomputation of each block under `remat:auto`; the planner chooses where it is left out."""
    offload_activations: bool = False
    """Whether what blocks keep for backward waits in the host's memory (remat none or full)."""
    keep_gathered: Kept | None = None
    """zero3: blocks kept whole through a step: how many last ones, their numbers, or `auto`."""
    splits: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = None
    """The layer that begins each later pipeline stage."""
    schedule: str | None = None
    """A text file with the pipeline schedule, instead of the plan's own."""
    weight_grad_group: Count = 1
    """Micro-batches whose weight gradients are computed together (split backwards)."""
    measure: bool = False
    """Whether stages are balanced by measured instead of estimated work."""
    stage_memory_gb: Positive | None = None
    """Memory within which stages are balanced, in 10^9 bytes."""


class ClusterSection(Section):
    """The devices, and the interface: by default the one that the machine's name leads to.

    Ranks of one machine listen on loopback alone.
    """

    name: str = "local"
    """`PRESETxCOUNT`, the path of a cluster file, or `local`."""
    interface: str | None = None
    """The network interface that ranks of several machines listen on."""
    transport: Literal["auto", "sockets"] = "auto"
    """`sockets` moves all bytes between processors through Gloo, also within one host."""

    @property
    def backend(self) -> str:
        """The name of the transport in `comm.init`."""
        return "gloo" if self.transport == "sockets" else "auto"


class Recovery(Section):
    """The treatment of ranks that fail, of signals that end a run, and of its checkpoints."""

    restarts: Annotated[int, Field(ge=0)] = 0
    """Lost ranks that are started again, in all, under any plan whose ranks step together."""
    snapshot_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between snapshots in memory; by default 1 where a run may go back to one, else 0."""
    wait_seconds: NonNegative = 10.0
    """Seconds that a lost rank has to come back before its worker counts as lost."""
    replan: str | Plans = "never"
    """A plan for the ranks that are left: `auto` (the planner's), `never`, or a list in order."""
    hang_seconds: Positive | None = None
    """Seconds without a sign after which a rank hangs; by default several steps, never under 5."""
    on_nan: Literal["stop", "skip", "back"] = "stop"
    """The answer to a loss or gradient that is no finite number."""
    spike_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """The multiple of the median gradient norm from which `on_nan` answers too."""
    check_replicas_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two comparisons of parameters that several ranks hold; 0 compares none."""
    deadline_seconds: Positive = 60.0
    """Seconds to save after SIGTERM, SIGUSR1 or SIGINT."""
    keep: Annotated[int, Field(ge=0)] = 0
    """The newest checkpoints that are kept; 0 keeps all."""

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on without a rank that is lost."""
        return self.restarts > 0 or self.replan != "never"

    @property
    def steps_between_snapshots(self) -> int:
        """The steps between two snapshots; 0 for none."""
        if self.snapshot_every is None:
            return int(self.goes_on or self.on_nan == "back")
        return self.snapshot_every


class Federated(Section):
    """A federation: the clients, the rounds and the server's rule; `[train]` is a client's."""

    clients: Count = 10
    """Clients in all."""
    rounds: Count = 10
    """Rounds in all."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of the clients that are asked in a round."""
    min_replies: Count = 1
    """Answers after which a deployed round waits for `patience_seconds` at most."""
    local_epochs: Count = 1
    """Passes of a client over its samples in a round."""
    partition: Literal["iid", "dirichlet", "shards", "quantity", "own"] = "iid"
    """The deal of one data set to clients; `own`: each client has its own data."""
    alpha: Positive = 0.5
    """Evenness of the `dirichlet` and `quantity` partitions."""
    shards_per_client: Count = 2
    """Shards of each client in partition `shards`."""
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
    """The rule by which the server uses the clients' changes."""
    server_lr: Positive = 1.0
    """Learning rate of the server."""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """`fedavgm`: momentum of the server."""
    server_betas: Betas = (0.9, 0.99)
    """`fedadam`, `fedyogi`: decay of the two running means."""
    tau: Positive = 1e-3
    """`fedadam`, `fedyogi`: the number that is added to the denominator."""
    mu: NonNegative = 0.1
    """`fedprox`: weight of the distance from the global weights."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """`trimmed`: the part that is cut off at either end."""
    num_bad: Annotated[int, Field(ge=0)] = 1
    """`krum`: the clients that may be bad."""
    secure: bool = False
    """Whether the server sees sums alone (secure aggregation)."""
    clip: Positive | None = None
    """Differential privacy: the largest norm of a client's change."""
    noise: NonNegative = 0.0
    """Differential privacy: the noise, in multiples of `clip`."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Differential privacy: the delta for which epsilon is reported."""
    workers: Count = 1
    """Processes that simulate clients."""
    evaluate_every: Count = 1
    """Rounds between two evaluations by the clients."""
    patience_seconds: Positive = 120.0
    """Seconds that a deployed round waits for further clients."""


class Eval(Section):
    """The evaluation while training, and of `plait evaluate`."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0 evaluates never while training."""
    batches: Count | None = None
    """Global batches of an evaluation; by default the whole data set."""
    data: Data | None = None
    """The data, with the keys of [data]; by default that of training."""
    keep_best: bool = False
    """Whether the weights of the best evaluation are kept in `best/`."""
    patience: Count | None = None
    """Evaluations in a row without a better loss after which training ends."""


TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class Log(Section):
    """The trackers that a run tells its metrics."""

    to: Annotated[tuple[TrackerName, ...], BeforeValidator(as_tuple)] = ()
    """Trackers: tensorboard, wandb, mlflow."""


SCHEMAS: Final[dict[str, type[Section]]] = {
    "data": Data,
    "train": Train,
    "plan": PlanSection,
    "cluster": ClusterSection,
    "federated": Federated,
    "recovery": Recovery,
    "adapter": AdapterConfig,
    "eval": Eval,
    "log": Log,
}
"""The schema of every section but `[model]`, in the order of a file."""


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
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)
