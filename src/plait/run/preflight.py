"""Checks of the things that a config names: modules, functions, packages, roles.

They come before a folder is made and before any rank starts, so that errors are said once.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING

from plait import reference
from plait.errors import DataError, ModelError, OptimizerError
from plait.launcher.main_process import is_main_process, say
from plait.values import JsonMapping

if TYPE_CHECKING:
    from plait.config import Config
    from plait.plan import Plan


def check_code(config: Config, plan: Plan) -> None:
    """Refuse what no rank could do. Errors: `ModelError`, `DataError`, naming what is missing."""
    check_optimizer(config.train.optimizer, plan)
    if plan.precision == "fp8":
        from plait.engine.eight_bits import check_trains

        check_trains(plan)
    if config.train.cuda_graphs:
        from plait.engine import graphs

        graphs.check_trains()
    model = config.model.keys_for_factory()
    if "python" in model:
        reference.load(model["python"], ModelError)
    if config.data.python is not None:
        reference.load(config.data.python, DataError)
    if config.eval.data is not None and config.eval.data.python is not None:
        reference.load(config.eval.data.python, DataError)
    _check_tokens(config)
    _tell_unused_words(config)
    if config.log.to:
        from plait.run.trackers import check_packages

        check_packages(config.log.to)
    if config.train.loss is not None:
        reference.load(config.train.loss, ModelError, "train.loss")
    if model.get("name") == "hf" and find_spec("transformers") is None:
        raise ModelError('model "hf" needs the package transformers: pip install "plait[hf]"')
    if config.adapter.kind is not None:
        _check_adapters(config)
    if config.model.roles is None and _needs_roles(plan):
        _check_roles(model)
    if plan.cp.size > 1 and model.get("name") == "hf":
        _check_sequences(config, plan)
    if config.data.packing or (config.eval.data is not None and config.eval.data.packing):
        _check_documents(config)


def _check_tokens(config: Config) -> None:
    """Make the tokens of files before a rank starts, and say how many documents are cut off."""
    sources = [config]
    if config.eval.data is not None:
        sources.append(replace(config, data=config.eval.data))
    for source in sources:
        if source.data.name in ("files", "hf") or source.data.mixture is not None:
            from plait.datasets import files
            from plait.run import assemble

            samples = assemble.make_dataset(source)
            if is_main_process():
                files.say_cut_off(samples)


def _check_adapters(config: Config) -> None:
    """Hang the adapters on the model without values: their targets and files must be there."""
    from plait.run import assemble

    assemble.bare_model(assemble.model_keys(config))


def check_optimizer(name: str, plan: Plan) -> None:
    """Refuse a matrix optimizer where whole matrices cannot be had, and a function that is not
    there. Errors: `OptimizerError`.
    """
    if ":" in name:
        _check_takes_parameters(name)
    if name != "muon":
        return
    if plan.dp.offload:
        raise OptimizerError(
            f"muon updates whole matrices, of which a rank holds parts under {plan.dp}; choose "
            f"dp{plan.dp.size}:zero1 without offload, or optimizer = 'adamw'"
        )


def _check_takes_parameters(name: str) -> None:
    """Refuse a function that cannot be called with the parameters alone."""
    function = reference.load(name, OptimizerError, "train.optimizer")
    try:
        form = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin: unknown
        return
    try:
        form.bind([])
    except TypeError as error:
        word = name.rpartition(":")[2]
        raise OptimizerError(
            f"train.optimizer = '{name}': {word}{form} is called with the parameters alone "
            f"({error}); write def {word}(params): and return a torch.optim.Optimizer of them"
        ) from None


def _tell_unused_words(config: Config) -> None:
    """Say which words of `no_decay` and patterns of `groups` fit no name of a parameter."""
    if not config.train.no_decay and not config.train.groups:
        return
    from plait.run import assemble

    try:
        model = assemble.bare_model(assemble.model_keys(config))
    except Exception:  # a user's model that cannot be made without values; it is made later
        return
    names = [name for name, _ in model.named_parameters()]
    for word in config.train.no_decay:
        if not any(word in name for name in names):
            say(
                f"plait: train.no_decay '{word}' is in no parameter's name and spares none; "
                f"names are such as '{names[-1]}'"
            )
    for group in config.train.groups:
        if not any(fnmatchcase(name, group.match) for name in names):
            say(
                f"plait: train.groups '{group.match}' fits no parameter's name; "
                f"names are such as '{names[-1]}'"
            )


def _needs_roles(plan: Plan) -> bool:
    """Whether a plan splits layers, for which it must know what modules mean."""
    return plan.tp.size > 1 or plan.tp.mode != "1d"


def _check_sequences(config: Config, plan: Plan) -> None:
    """See that the sequences of a library's model can be cut."""
    from plait.engine.splitting import rehearse_sequences
    from plait.run import assemble

    made = assemble.make_model(assemble.model_keys(config), config.train.seed)
    rehearse_sequences(made, plan, assemble.make_options(config, plan))


def _check_documents(config: Config) -> None:
    """See that a model which is not plait's own keeps the documents of packed samples apart."""
    from plait.engine.splitting import rehearse_documents
    from plait.run import assemble

    keys = assemble.model_keys(config)
    if "python" in keys:
        model = assemble.bare_model(keys)
        missing = {"documents", "positions"} - inspect.signature(model.forward).parameters.keys()
        if missing:
            raise ModelError(
                f"packing gives a model (input_ids, documents, positions), and the forward of "
                f"{type(model).__name__} takes no {' and no '.join(sorted(missing))}; add them, "
                "each [B, S], or leave packing out"
            )
    elif keys.get("name") == "hf":
        rehearse_documents(assemble.make_model(keys), assemble.make_options(config))


def _check_roles(model: JsonMapping) -> None:
    """See that a library's model has a table of roles; a user's own gets it from a batch."""
    if model.get("name") != "hf":
        return
    import torch

    from plait import models

    keys = dict(model)
    with torch.device("meta"):
        models.roles_for(models.make(keys.pop("name"), **keys))
