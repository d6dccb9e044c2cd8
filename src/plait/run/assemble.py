"""From a config to a run: the model, the data and the options of training that `[model]`, `[data]`
and `[train]` name.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from plait import datasets, models, reference
from plait.cluster.products import ProductTable
from plait.comm import World
from plait.config import Config, Data, ModelSection, PlanSection, Train
from plait.datasets import Loader
from plait.datasets.loader import InOrder
from plait.datasets.sample_set import SampleSet
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.loss import LossFunction
from plait.engine.seeds import derive_seed
from plait.engine.stages.cut import Cutting
from plait.engine.state.start import make_whole
from plait.errors import DataError, ModelError
from plait.models import adapter_files, losses, user
from plait.models.adapter_parts import AdapterSettings
from plait.outer import Asynchrony
from plait.parallel.expert import Placing
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.text import load as load_schedule
from plait.plan import (
    KeepGathered,
    Plan,
    check_batch,
    check_shares,
    gathers_layers,
    whole_shares,
)
from plait.products import MEASURED
from plait.run import optimizers
from plait.values import JsonMapping

ADAPTER = "adapter"
"""The key of a model's keys that holds its `[adapter]`."""
FROZEN = "frozen"
"""The key that holds the patterns of parameters that do not train."""


class ConfigSource(Protocol):
    """The sections that training is made of: a `Config`, or the problem of a proof.

    `model` and `data` may be plain keys; `train` and `plan` hold every key with its default.
    """

    @property
    def model(self) -> ModelSection | JsonMapping:
        """The model by name, or the user's function."""

    @property
    def data(self) -> Data | JsonMapping:
        """The data by name, or the user's function."""

    @property
    def train(self) -> Train:
        """Batch, optimizer and all options of training."""

    @property
    def plan(self) -> PlanSection:
        """The cut of a pipeline and its schedule."""


@dataclass(frozen=True)
class Training:
    """An engine and the batches for it."""

    engine: Engine
    loader: Loader


def assemble(
    config: ConfigSource, plan: Plan, world: World, products: ProductTable | None = None
) -> Training:
    """Build what a config names, under a plan, on this rank. Collective.

    `products` is the table of the run, else the config's. Errors: those of `build`, and
    `DataError`.
    """
    check_batch(plan, config.train.global_batch)
    check_shares(plan, config.plan.shares, config.train.global_batch)
    options = make_options(config, plan)
    if products is not None:
        options = replace(options, linear_product=products)
    if isinstance(config, Config):
        recovery = config.recovery
        options = replace(
            options,
            on_nan=recovery.on_nan,
            spike_factor=recovery.spike_factor,
            cuda_graphs=config.train.cuda_graphs,
        )
    engine = build(
        make_model(model_keys(config), config.train.seed),
        plan,
        loss=make_loss(config.train, model_keys(config)),
        optimizer=optimizers.from_config(config.train),
        options=options,
        world=world,
    )
    loader = make_loader(config, *world.worker)
    loader.skip(engine.step_index)
    return Training(engine, loader)


def model_keys(config: ConfigSource) -> JsonMapping:
    """The `[model]` section as plain keys: `name` or `python`, and what the model's constructor
    takes. An `[adapter]` and the patterns of frozen parameters are keys more.
    """
    section = config.model
    if isinstance(section, Mapping):
        return {key: value for key, value in section.items() if key != "roles"}
    keys = section.keys_for_factory()
    train = getattr(config, "train", None)
    frozen = [group.match for group in getattr(train, "groups", ()) if group.freeze]
    if frozen:
        keys = {**keys, FROZEN: frozen}
    adapter = getattr(config, "adapter", None)
    if adapter is None or adapter.kind is None:
        return keys
    return {**keys, ADAPTER: adapter.as_dict()}


def roles_of(config: ConfigSource) -> Mapping[str, str] | None:
    """The user's own table of roles."""
    section = config.model
    return section.get("roles") if isinstance(section, Mapping) else section.roles


def make_model(keys: JsonMapping, seed: int = 0) -> nn.Module:
    """The model on the meta device; a user's own with the values that its code gives it.

    Those are the values of plain PyTorch on the CPU with `torch.manual_seed(seed)` right before the
    user's function. So the model is whole on every rank while it is built. A module that says
    `INITIALISE_BY_NAME = True` beside the function leaves its models on the meta device.
    """
    model = _make_base(keys, seed)
    return with_frozen(with_adapters(model, keys, seed), keys)


def with_frozen(model: nn.Module, keys: JsonMapping) -> nn.Module:
    """A model whose parameters of frozen groups do not train. Errors: `ModelError` if none does."""
    patterns = keys.get(FROZEN, ())
    for name, param in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            param.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in model.parameters()):
        raise ModelError(
            f"train.groups freeze every parameter of the model ({', '.join(patterns)}); leave "
            "at least one to train"
        )
    return model


def with_adapters(model: nn.Module, keys: JsonMapping, seed: int) -> nn.Module:
    """A model with the adapters that its keys name, each matrix from the seed of its name."""
    table = keys.get(ADAPTER)
    if table is None:
        return model
    wanted = {**table, "targets": table.get("targets") and tuple(table["targets"])}

    def reseed(name: str) -> None:
        torch.manual_seed(derive_seed(seed, "parameters", name))

    return adapter_files.with_adapters(model, AdapterSettings(**wanted), reseed)


def bare_model(keys: JsonMapping) -> nn.Module:
    """The model with its adapters on the meta device, also one that is the user's own."""
    python = keys.get("python")
    if python is None:
        return make_model(keys)
    with torch.device("meta"):
        model = with_adapters(user.make(python, keys.get("arguments")), keys, 0)
        return with_frozen(model, keys)


def _make_base(keys: JsonMapping, seed: int) -> nn.Module:
    """The model without adapters."""
    arguments = {key: value for key, value in keys.items() if key not in ("roles", ADAPTER, FROZEN)}
    python = arguments.pop("python", None)
    given = arguments.pop("arguments", None)
    if python is not None and not user.initialises_by_name(python):
        return make_whole(functools.partial(user.make, python, given), seed)
    with torch.device("meta"):
        if python is not None:
            return user.make(python, given)
        return models.make(arguments.pop("name"), **arguments)


def make_loss(train: Train, keys: JsonMapping) -> LossFunction:
    """`[train] loss`, a user's function of (output, targets); else the squared error of models of
    fields, or cross-entropy.
    """
    if train.loss is not None:
        return reference.load(train.loss, ModelError, "train.loss")
    return losses.mse if keys.get("name") in models.OF_FIELDS else losses.cross_entropy


def make_options(config: ConfigSource, plan: Plan | None = None) -> Options:
    """The options of `build` that a config names and a plan does not."""
    train = config.train
    keys = model_keys(config)
    cutting = Cutting()
    schedule = None
    if plan is not None and plan.pp.size > 1:
        cutting = make_cutting(config)
        schedule = make_schedule(config)
    elif plan is not None and _follows(plan, keys):
        cutting = make_cutting(config)
    return Options(
        seed=train.seed,
        blocks=models.blocks_of(keys["name"]) if "name" in keys else None,
        roles=roles_of(config),
        clip_grad_norm=train.clip_grad_norm,
        learning_rate=optimizers.learning_rate(train),
        num_servers=train.num_servers,
        aggregate=train.aggregate,
        asynchrony=Asynchrony(
            outer_lr=train.outer_lr,
            outer_momentum=train.outer_momentum,
            compress=train.compress,
            staleness_rate=train.staleness_rate,
        ),
        float16=train.float16,
        placing=Placing(train.place_experts_every, train.spare_expert_slots),
        grouped_product=train.grouped_product,
        linear_product=product_of(train),
        fixed_order=train.fixed_order,
        messages=train.messages,
        weight_grad_group=config.plan.weight_grad_group,
        remat=config.plan.remat,
        offload_activations=config.plan.offload_activations,
        keep_gathered=kept_under(plan, config.plan),
        cutting=cutting,
        schedule=schedule,
    )


def kept_under(plan: Plan | None, section: PlanSection) -> KeepGathered:
    """The blocks that stay whole; none under a plan without zero3.

    A plan that runs was checked. The plans that a proof derives from it may gather nothing.
    """
    return section.keep_gathered if plan is not None and gathers_layers(plan) else None


def _follows(plan: Plan, keys: JsonMapping) -> bool:
    """Whether a plan splits what only a forward of the model shows."""
    family = keys.get("name")
    if family not in models.CLASSES:
        return plan.cp.size * plan.tp.size > 1
    return plan.cp.size > 1 and "attention" not in models.roles_of(str(family)).values()


def product_of(train: Train) -> str:
    """The choice of the library of products. A measurement may choose otherwise in another run, so
    sums of a fixed order go by rule.
    """
    by_rule = train.fixed_order and train.linear_product == MEASURED
    return "rule" if by_rule else train.linear_product


def make_cutting(config: ConfigSource) -> Cutting:
    """Where a pipeline cuts the model, and one sample of the data for models whose forward must be
    seen.
    """
    section = config.plan
    batch = next(Loader(make_dataset(config), config.train.global_batch, seed=config.train.seed))
    inputs = batch if isinstance(batch, Mapping) else batch[0]
    return Cutting(
        counts=section.counts,
        splits=section.splits,
        measure=section.measure,
        memory_bytes=(section.stage_memory_gb or math.inf) * 1e9,
        example=tree_map_only(Tensor, lambda tensor: tensor[:1], inputs),
    )


def make_schedule(config: ConfigSource) -> Schedule | None:
    """The schedule of `[plan] schedule`, a text file; None where the plan's own is meant."""
    path = config.plan.schedule
    return None if path is None else load_schedule(path)


def make_loader(config: ConfigSource, rank: int = 0, size: int = 1) -> Loader:
    """The share of data coordinate `rank` of `size` in every global batch."""
    train = config.train
    return Loader(
        make_dataset(config),
        train.global_batch,
        dp_size=size,
        dp_rank=rank,
        seed=train.seed,
        workers=datasets.key(config.data, "workers", 0),
        shares=shares_between(config.plan, size),
    )


def make_dataset(config: ConfigSource) -> SampleSet:
    """The samples of training. Raises `DataError` where they do not fit the model."""
    _check_alphabet(config)
    keys = model_keys(config)
    mixes = datasets.key(config.data, "mixture") is not None
    of_tokens = mixes or datasets.key(config.data, "name") in datasets.TOKEN_DATA
    if of_tokens and keys.get("name") == "hf":
        keys = {**keys, "vocab_size": models.hf_vocabulary(keys["config"])}
    elif keys.get("name") == "hf" and datasets.key(config.data, "name") == "random":
        keys = {**keys, "config": models.hf_config(keys["config"])}
    train = config.train
    return datasets.make(config.data, keys, train.seed, train.global_batch)


def shares_between(section: PlanSection, size: int) -> tuple[int, ...]:
    """The shares of `size` data ranks in a batch; none where `[plan]` has them for another number.

    A plan that runs was checked against its shares. The plans that a proof derives from it take
    equal parts.
    """
    shares = section.shares
    return whole_shares(shares) if shares and len(shares) == size else ()


def make_eval_batches(
    config: Config, rank: int = 0, size: int = 1, batches: int | None = None
) -> InOrder:
    """The share of data coordinate `rank` of `size` in the batches of an evaluation.

    `batches` replaces `[eval] batches`. The data are those of `[eval]`, else of `[data]`.
    """
    source = config if config.eval.data is None else replace(config, data=config.eval.data)
    dataset = make_dataset(source)
    count = config.eval.batches if batches is None else batches
    return InOrder(
        dataset,
        config.train.global_batch,
        dp_size=size,
        dp_rank=rank,
        batches=count,
        shares=shares_between(config.plan, size),
    )


def _check_alphabet(config: ConfigSource) -> None:
    """A Hugging Face config that says no vocabulary has that of its family's tokenizer: no
    bytes.
    """
    keys = model_keys(config)
    data = config.data
    said = datasets.key(data, "tokenizer") is not None
    if keys.get("name") != "hf" or said or datasets.key(data, "name") not in datasets.BYTE_DATA:
        return
    size = models.hf_vocabulary(keys["config"])
    bytes_ = datasets.VOCAB_SIZE
    if size is not None and size != bytes_:
        raise DataError(
            f"the model's vocabulary has {size} tokens, and data {datasets.key(data, 'name')!r} is "
            f"{bytes_} bytes; set "
            f"vocab_size = {bytes_} in model.config, give tokens by data.python, or say "
            "data.tokenizer = 'bytes' to train "
            "on bytes all the same"
        )


def set_torch(train: Train) -> None:
    """Have torch compute as `[train]` asks for."""
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if train.fixed_order and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more would cut products in as many parts as a rank has cores
