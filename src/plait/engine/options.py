"""Settings of a build beside the plan. Every part has a default, so that most scripts need none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from plait.cluster.products import ProductTable
from plait.engine.stages.cut import Cutting
from plait.engine.update import LearningRate
from plait.outer import Asynchrony
from plait.parallel.expert import Placing
from plait.parallel.pipeline.actions import Schedule
from plait.plan.axes import BlockRemat
from plait.plan.gathered import KeepGathered
from plait.plan.precisions import Messages
from plait.products import MEASURED


@dataclass(frozen=True)
class Options:
    """The settings that a plan does not have.

    Attributes:
        seed: of the initial values (by name) and of dropout (by step and micro-batch).
        blocks: pattern of the model's repeated blocks, as `layers.*`; found by structure where it
            is None.
        roles: from module pattern to role; None takes the model's own table.
        clip_grad_norm: the largest norm of the gradient; None does not clip.
        learning_rate: factor on the optimizer's lr by step, from 0.
        num_servers: ranks that serve under `dpN:server`; None means all.
        asynchrony: of `local` and `async-server`, beside the plan's everyH and staleK: outer step,
            compression, rates.
        aggregate: how servers join the workers' gradients: `sum` (the global mean loss) or `mean`
            (the mean of the workers' means). Both are the same where every worker counts as many
            tokens.
        cutting: where a pipeline cuts the model; balanced by estimated cost where it says nothing.
        compile_backend: of torch.compile, where the plan says compile.
        float16: compute in float16 where the plan says float32, with a dynamic scale of the loss.
        placing: whether experts are moved between steps, with copies of the busiest.
        grouped_product: of experts: `rule`, `measure` (after the first step), or one of
            `models.grouped.METHODS`.
        schedule: of the pipeline, in place of the plan's.
        linear_product: of layers and experts: `measured` (the quicker of torch's libraries here),
            `rule`, `torch`, or a table. Compiled products are torch's.
        weight_grad_group: of a schedule that splits backwards: the micro-batches whose weight
            gradients are made at once. More are quicker, and keep their factors for longer.
        on_nan: `stop` raises at a loss or gradient that is no number, `skip` drops the step. With
            `back` it is dropped, and the loop loads an earlier state (`engine.guard.rolls_back`).
        spike_factor: the multiple of the median gradient norm from which a step is such a one too.
        fixed_order: sums over micro-batches and data ranks follow one tree, for equal bits under
            any number of ranks.
        messages: `whole`, or `bf16`: activations and their gradients travel between stages and
            tensor ranks in two bytes a number.
        remat: recomputation of each block in the model's order, where the plan says `remat:auto`;
            `plait.estimate(config, plan, cluster).remat` has it.
        offload_activations: what blocks keep for backward waits in the host's memory.
        keep_gathered: blocks that `zero3` keeps whole once a step has gathered them. It is the
            number of the last ones, or a tuple of numbers in the model's order.
        defer_reads: the host hears of loss and norm a step later, so that it waits for no device.
            None does it on all devices but processors.
        cuda_graphs: one rank on a GPU launches all kernels before the update as one graph. Where it
            cannot, a warning says why, and steps run without.
    """

    seed: int = 0
    blocks: str | None = None
    roles: Mapping[str, str] | None = None
    clip_grad_norm: float | None = None
    learning_rate: LearningRate | None = None
    num_servers: int | None = None
    aggregate: str = "sum"
    asynchrony: Asynchrony = field(default_factory=Asynchrony)
    cutting: Cutting = field(default_factory=Cutting)
    float16: bool = False
    compile_backend: str = "inductor"
    schedule: Schedule | None = None
    placing: Placing = field(default_factory=Placing)
    grouped_product: str = "rule"
    linear_product: str | ProductTable = MEASURED
    weight_grad_group: int = 1
    on_nan: str = "stop"
    spike_factor: float | None = None
    fixed_order: bool = False
    messages: Messages = "whole"
    remat: tuple[BlockRemat, ...] | None = None
    offload_activations: bool = False
    keep_gathered: KeepGathered = None
    cuda_graphs: bool = False
    defer_reads: bool | None = None

    @property
    def wire(self) -> torch.dtype | None:
        """The type in which wider activations travel; None sends them as they are."""
        return torch.bfloat16 if self.messages == "bf16" else None
