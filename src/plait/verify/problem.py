"""The problem that both sides train: model, data and options, as plain data sent to the ranks.

Ranks and reference make everything from it themselves, so that nothing but the problem is shared
between what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plait import datasets, models
from plait.batch_trees import map_tensors
from plait.config import Data, PlanSection, Train
from plait.datasets import Loader, Masked
from plait.datasets.collate import collate
from plait.datasets.sample_set import SampleSet
from plait.engine.build import Options
from plait.engine.loss import LossFunction
from plait.engine.precision import DTYPES, MASTER_DTYPES
from plait.engine.seeds import derive_seed
from plait.engine.state.init import is_meta
from plait.errors import ModelError
from plait.models import losses
from plait.plan import Plan
from plait.products import MEASURED
from plait.run import assemble, optimizers
from plait.values import JsonMapping, PyTree
from plait.verify.reference.batches import Batch, num_samples, taken
from plait.verify.reference.coded import round_base
from plait.verify.reference.copied import in_precision
from plait.verify.reference.one_device import Slice
from plait.verify.reference.plain.data import plain_batches
from plait.verify.reference.plain.layers import plain_layers
from plait.verify.reference.plain.training import plain_loss, plain_optimizer, plain_rate
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.start import plain_start, start_by_name
from plait.verify.reference.synced_norms import on_one_device


@dataclass(frozen=True)
class FirstSamples:
    """The first `size` samples of a data set, stacked as that set stacks them."""

    dataset: SampleSet
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> PyTree:
        return self.dataset[range(self.size)[index]]

    def batch(self, indices: Tensor) -> Batch:
        """Samples [B] by their numbers."""
        return collate(self.dataset, indices)


@dataclass(frozen=True)
class Problem:
    """One training problem: sections of a config, with what a probe changes.

    `masked` pads targets unevenly. `frozen` names parameters, or modules with all of theirs, that
    do not train. `idle` adds a parameter that no forward uses. `num_samples` keeps only the first
    samples of the data. `hurried` shortens periods of every few steps, and gives oneDNN every
    product that may choose its library. `plan`: the section of a config that says where a pipeline
    cuts the model and what schedule it runs. `backend`: of `comm.init`, which moves the bytes.
    `largest_rate` bounds the learning rate of probes with SGD.
    """

    model: JsonMapping
    data: Data | JsonMapping
    train: Train
    masked: bool = False
    frozen: tuple[str, ...] = ()
    idle: bool = False
    num_samples: int | None = None
    hurried: bool = False
    plan: PlanSection = field(default_factory=PlanSection)
    backend: str = "auto"
    largest_rate: float = math.inf

    def make_model(self) -> nn.Module:
        """On the meta device; with its values where it cannot be initialised from there."""
        model = assemble.make_model(self.model, self.train.seed)
        if self.idle:
            model.add_module("idle", self._idle(is_meta(model)))
        return self._freeze(model)

    def make_whole_model(self, dtype: torch.dtype) -> nn.Module:
        """With its values, on the host, made without the engine where plain PyTorch has a start."""
        model = plain_layers(round_base(self._with_values(dtype)), self.model)
        on_one_device(model)
        return model

    def _with_values(self, dtype: torch.dtype) -> nn.Module:
        seed = self.train.seed
        start = self.make_model()
        model = plain_start(self.model, seed, start)
        if model is None:
            start_by_name(start, seed, dtype)
            return in_precision(start, dtype)
        # Matrices that the engine draws by name have the width of the run from the start.
        model = in_precision(model, dtype) if is_meta(start) else model
        model = assemble.with_adapters(model, self.model, seed)
        model = assemble.with_frozen(model, self.model)
        if self.idle:
            more = nn.ModuleDict({"idle": self._idle(is_meta(start))})
            if is_meta(more):
                start_by_name(more, seed, dtype)
            model.add_module("idle", more["idle"])
        return in_precision(self._freeze(model), dtype)

    def _idle(self, on_meta: bool) -> nn.Module:
        """A layer that no forward uses."""
        device = "meta" if on_meta else "cpu"
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(self.train.seed)  # alike on all ranks
            return nn.Linear(5, 1, bias=False)

    def _freeze(self, model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            if any(f"{name}.".startswith(f"{frozen}.") for frozen in self.frozen):
                parameter.requires_grad_(False)
        return model

    def loader(self, rank: int = 0, size: int = 1) -> Loader:
        """This data coordinate's part of each global batch."""
        return Loader(
            self._dataset(),
            self.train.global_batch,
            dp_size=size,
            dp_rank=rank,
            seed=self.train.seed,
            shares=assemble.shares_between(self.plan, size),
        )

    def _dataset(self) -> Any:
        dataset: Any = datasets.make(
            self.data, self.model, self.train.seed, self.train.global_batch
        )
        if self.num_samples is not None:
            dataset = FirstSamples(dataset, min(self.num_samples, len(dataset)))
        return Masked(dataset, seed=self.train.seed) if self.masked else dataset

    def batches(self, steps: int, dtype: torch.dtype) -> list[Batch]:
        """The first global batches, whole; the loader is not asked."""
        made = plain_batches(self._dataset(), self.train.global_batch, self.train.seed)
        return [_cast(batch, dtype) for batch in islice(made, steps)]

    @property
    def loss(self) -> LossFunction:
        """The function that training minimises."""
        return assemble.make_loss(self.train, self.model)

    def loss_under(self, plan: Plan) -> LossFunction:
        """The loss for the engine; hurried, the way that large logits take."""
        loss = self.loss
        if self.hurried and loss is losses.cross_entropy and plan.tp.size == 1:
            return losses.cross_entropy_by_rows
        return loss

    def recipe(self) -> Recipe:
        """For the reference: the same options of training, read again, and none of the engine."""
        own = self.train.loss is not None
        loss = self.loss if own else plain_loss(self.model)
        return Recipe(
            loss, self._optimizer, self.train.clip_grad_norm, partial(plain_rate, self.train)
        )

    def _optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The plain one, element by element: the engine may use a fused kernel."""
        if ":" not in self.train.optimizer:
            return plain_optimizer(self.train, params)
        optimizer = optimizers.from_config(self.train)(params)
        for group in optimizer.param_groups:
            group.update(fused=False, foreach=False)
        return optimizer

    @property
    def make_optimizer(self) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
        """For the engine."""
        return optimizers.from_config(self.train)

    def options(self, plan: Plan) -> Options:
        """For the engine. A schedule of the user's own is for one plan; a probe that changes its
        shape takes the plan's.
        """
        options = assemble.make_options(self, plan)
        own = options.schedule
        if own is not None and (own.num_ranks, own.num_micro_batches) != (
            plan.pp.size,
            plan.micro_batches,
        ):
            options = replace(options, schedule=None)
        if self.hurried and options.placing.every:
            placing = replace(options.placing, every=1, gain=-math.inf)
            options = replace(options, placing=placing)
        if self.hurried and options.linear_product == MEASURED:
            options = replace(options, linear_product="rule")
        if not self.idle:
            return options
        try:
            roles = models.roles_for(self.make_model()) if options.roles is None else options.roles
        except ModelError:  # a model without a table is not split by layers
            return options
        return replace(options, roles={**roles, "idle": "replicated"})

    def slices(self, plan: Plan) -> Callable[[int, Batch], Sequence[Slice]]:
        """The slices into which the plan should cut each global batch, with seeds for dropout.

        The cut of the loader is not asked.
        """

        def cut(step: int, batch: Batch) -> list[Slice]:
            cut_slices = []
            shares = _loader_shares(num_samples(batch), plan.dp.size, self.plan.shares)
            for rank, share in enumerate(shares):
                for index, rows in enumerate(_even_parts(share, plan.micro_batches)):
                    seed = derive_seed(
                        self.train.seed, "step", step, rank * plan.micro_batches + index
                    )
                    cut_slices.append(Slice(rank, index, taken(batch, rows), seed))
            return cut_slices

        return cut


def reference_dtype(plan: Plan) -> torch.dtype:
    """The precision of the one device: that of the masters."""
    return MASTER_DTYPES[plan.precision]


def plan_dtype(plan: Plan) -> torch.dtype:
    """The precision of the ranks."""
    return DTYPES[plan.precision]


def with_keys(section: Train, **keys: object) -> Train:
    """A copy of `[train]` with other values."""
    return section.model_copy(update=keys)


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Floating tensors in the precision of the run."""
    cast: Batch = map_tensors(
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch
    )
    return cast


def _loader_shares(total: int, size: int, shares: Sequence[float] | None = None) -> list[range]:
    """Data rank r gets the samples from n r / size to n (r + 1) / size, rounded down.

    With shares, r / size is the part of all ranks before r.
    """
    parts = [Fraction(1)] * size
    if shares and len(shares) == size:
        parts = [Fraction(str(share)) for share in shares]
    ends = [Fraction(0), *accumulate(parts)]
    edges = [int(total * end / ends[-1]) for end in ends]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _even_parts(share: range, count: int) -> list[range]:
    """Parts that differ by one sample at most, the longer ones first."""
    size, longer = divmod(len(share), count)
    edges = [index * size + min(index, longer) for index in range(count + 1)]
    return [share[start:stop] for start, stop in pairwise(edges)]
