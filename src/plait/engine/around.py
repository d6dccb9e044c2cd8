"""The steps around the stages: micro-batches, routers, and the modules that get facts of them."""

from __future__ import annotations

from functools import partial

from torch import nn

from plait.comm import World
from plait.engine.axes import data_axis
from plait.engine.balance import Balance, ExpertSettings, has_routers
from plait.engine.batch import BatchSplitter
from plait.engine.loss import LossFunction
from plait.engine.options import Options
from plait.engine.precision import Precision
from plait.engine.splitting import SplitModel
from plait.engine.stages.contexts import (
    MicroBatchContext,
    NormContext,
    TensorContext,
    share_of,
)
from plait.engine.stages.cut import StagePartition
from plait.engine.time_first import TimeFirst
from plait.engine.with_experts import make_placer
from plait.parallel.data.synced_norms import SyncedNorms
from plait.plan import Plan
from plait.products import Products


def make_balance(
    model: nn.Module, split: SplitModel, options: Options, world: World, loss: LossFunction
) -> Balance | None:
    """The routers of a model with experts; None for a dense one."""
    if not has_routers(model):
        return None
    is_split = split.experts is not None
    settings = ExpertSettings(
        placer=make_placer(model, world, options.placing) if is_split else None,
        grouped_product=options.grouped_product,
        products=Products(options.linear_product, world.paths),
    )
    axes = (data_axis(world), world.axis("pp"))
    return Balance(model, axes, split.sequence, loss, settings)


def contexts_of(
    split: SplitModel,
    stages: tuple[nn.Module, StagePartition],
    balance: Balance | None,
    norms: SyncedNorms,
    world: World,
    *,
    time_first: TimeFirst,
) -> list[MicroBatchContext]:
    """The modules that must know which micro-batch is under way, of a model cut into `stages`."""
    contexts: list[MicroBatchContext] = []
    if split.layers is not None:
        model, cut = stages
        contexts.append(TensorContext(split.layers, model, cut.links))
    if balance is not None:
        contexts.append(balance)
    if norms:
        norms.connect(world.axis("dp"))
        contexts.append(NormContext(norms))
    if time_first:
        contexts.append(time_first)
    return contexts


def make_splitter(
    model: nn.Module, plan: Plan, precision: Precision, split: SplitModel, world: World
) -> BatchSplitter:
    """Cuts a batch of this rank into micro-batches, and takes the parts of other axes."""
    by_layers = split.layers is not None and split.layers.divides_samples
    splitter = partial(
        BatchSplitter,
        model,
        plan.micro_batches,
        precision.compute,
        world.device,
        divides=plan.micro_batches > 1 or plan.cp.size > 1 or by_layers,
    )
    if split.sequence is not None:
        size = split.sequence.axis.size
        parts = 1 if split.sequence.whole_inputs else size
        cut = split.sequence.cut
        splitter = partial(splitter, cut=cut, ranks_a_sample=size, parts=parts)
    if split.layers is not None:
        splitter = partial(splitter, share=partial(share_of, split.layers))
    return splitter()
