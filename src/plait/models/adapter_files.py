"""The files of PEFT: `adapter_model.safetensors` and `adapter_config.json`.

A matrix of the layer `x` is called `base_model.model.x.lora_A.weight` there; a magnitude has no
`.weight` behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.models.adapter_parts import AdapterSettings, parts_of
from plait.models.adapters import Reseed, adapt, adapted, linear_layers, magnitudes
from plait.models.expert_adapters import peft_places
from plait.models.hf import EncoderDecoder, HuggingFace
from plait.models.weights import (
    JoinedTensor,
    RowNorms,
    Stored,
    Weights,
    fit,
    open_folder,
    weights_of,
)
from plait.values import JsonObject

MODEL = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
WRAPPER = "model."
"""The prefix that plait's wrapper of a library's model adds to names."""
MAGNITUDE = "lora_magnitude_vector"
TASKS: dict[type[nn.Module], str] = {HuggingFace: "CAUSAL_LM", EncoderDecoder: "SEQ_2_SEQ_LM"}
"""PEFT's task of a wrapper. It has none for masked language models and for pictures."""
NEUTRAL = {
    "alpha_pattern": (None, {}),
    "rank_pattern": (None, {}),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings of PEFT that `[adapter]` has no words for, and their values that change nothing here.

Starts beside those listed (PiSSA, OLoRA, CorDA, LoftQ) change the weights of the base, too.
"""


def peft_names(model: nn.Module) -> dict[str, str]:
    """The name in PEFT's file of each adapter parameter, by its name in the model."""
    names = {}
    for name, module in adapted(model).items():
        places = peft_places(module.adapter.keys)
        for key, _ in parts_of(module):
            part, _, matrix = key.partition(".")  # lora_A.down_proj, of packed experts
            there = f"{name}{places.get(matrix, '')}.{part}"
            names[f"{name}.{key}.weight"] = _peft_name(model, there)
    return names


def _peft_name(model: nn.Module, part: str) -> str:
    end = "" if part.endswith(MAGNITUDE) else ".weight"
    bare = base_name(model, part)
    return f"{bare}{end}" if bare.startswith(PREFIX) else f"{PREFIX}{bare}{end}"


def base_name(model: nn.Module, name: str) -> str:
    """The name of a module as the library itself has it."""
    return name.removeprefix(WRAPPER) if is_wrapped(model) else name


def is_wrapped(model: nn.Module) -> bool:
    """Whether a model is plait's wrapper of a library's, for any task."""
    return isinstance(model, HuggingFace)


def with_adapters(
    model: nn.Module, settings: AdapterSettings, reseed: Reseed | None = None
) -> nn.Module:
    """`adapters.adapt`, and the values that are in files: PEFT's, and magnitudes of saved weights.

    Raises `ModelError` as `adapt` and `load`.
    """
    adapt(model, settings, reseed)
    if settings.weights is not None:
        load(model, settings)
    derive_magnitudes(model)
    return model


def load(model: nn.Module, settings: AdapterSettings) -> None:
    """Take the start of the adapters from PEFT's files.

    A model on the meta device learns where they are. Raises `ModelError` for files that are
    missing, and for adapters of another kind, rank or place.
    """
    directory = Path(str(settings.weights))
    _check_config(directory, settings)
    names = peft_names(model)
    params = dict(model.named_parameters())
    wanted = {peft: tuple(params[name].shape) for name, peft in names.items()}
    fitting = fit(directory, open_folder(directory, (MODEL,)), wanted)
    stored = {name: fitting.stored[peft] for name, peft in names.items()}
    if any(param.is_meta for param in params.values()):
        add_weights(model, directory, stored)
        return
    with Weights(directory, stored).reading() as reader, torch.no_grad():
        for name in stored:
            params[name].copy_(reader.read(name))


def add_weights(model: Any, directory: Path, stored: Mapping[str, Stored]) -> None:
    """Let a meta model know where more of its values are."""
    known = weights_of(model)
    if known is None:
        model.weights = Weights(directory, stored)
    else:
        model.weights = Weights(known.directory, {**known.stored, **stored})


def derive_magnitudes(model: nn.Module) -> None:
    """Let magnitudes of layers whose weights are in files be read from these."""
    known = weights_of(model)
    if known is None or not any(param.is_meta for param in model.parameters()):
        return
    derived: dict[str, Stored] = {}
    for weight, (name, transposed) in magnitudes(model).items():
        if (
            weight in known
            and name not in known
            and not isinstance(known.stored[weight], JoinedTensor)
        ):
            base = known.stored[weight]
            shape = (base.shape[1 if transposed else 0],)
            derived[name] = RowNorms(base.file, base.key, shape, transposed)
    if derived:
        add_weights(model, known.directory, derived)


def _check_config(directory: Path, settings: AdapterSettings) -> None:
    """Refuse an adapter whose settings are others."""
    path = directory / CONFIG
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ModelError(
            f"adapter.weights {str(directory)!r} has no {CONFIG}: {failure.strerror}"
        ) from failure
    except ValueError as failure:
        raise ModelError(f"{str(path)!r} is not JSON: {failure}") from failure
    if others := {key: table[key] for key in NEUTRAL if table.get(key) not in NEUTRAL[key]}:
        listed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in others.items())
        raise ModelError(
            f"{str(path)!r} says {listed}, which [adapter] has no words for; merge that adapter "
            "into its model with PEFT (merge_and_unload), and name that folder in model.weights"
        )
    kind = "dora" if table.get("use_dora") else str(table.get("peft_type", "LORA")).lower()
    rank = int(table.get("r", 8))
    alpha = float(table.get("lora_alpha", 8))
    scale = alpha / (rank**0.5 if table.get("use_rslora") else rank)
    if (kind, rank) != (settings.kind, settings.rank):
        raise ModelError(
            f"{str(path)!r} is a {kind} of rank {rank}, and [adapter] says {settings.kind} of rank "
            f"{settings.rank}; make them equal"
        )
    if scale != settings.scale:
        raise ModelError(
            f"{str(path)!r} scales by {scale:g} (lora_alpha {alpha:g}), and [adapter] by "
            f"{settings.scale:g}; set adapter.alpha = {scale * rank:g}"
        )


@dataclass(frozen=True)
class AdapterForm:
    """Contents of an adapter's files, apart from its numbers: the config, and the name of each
    parameter there.
    """

    config: JsonObject
    names: dict[str, str]


def form_of(model: nn.Module) -> AdapterForm:
    """The form of the adapters of a model, which are alike but for their places."""
    adapters = {name: module.adapter for name, module in adapted(model).items()}
    first = next(iter(adapters.values()))
    layers = [name for name, adapter in adapters.items() if not adapter.keys]
    experts = {name: adapter.keys for name, adapter in adapters.items() if adapter.keys}
    inner = getattr(model, "model", model) if is_wrapped(model) else model
    config = getattr(inner, "config", None)
    table = {
        "peft_type": "LORA",
        "task_type": TASKS.get(type(model)),
        "base_model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "lora_dropout": first.dropout,
        "use_dora": first.kind == "dora",
        "fan_in_fan_out": any(adapters[name].transposed for name in layers),
        "target_modules": _target_names(model, layers),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    if experts:
        table["target_parameters"] = _target_parameters(model, experts)
    return AdapterForm(table, peft_names(model))


def _target_parameters(model: nn.Module, experts: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The matrices of packed experts, by their whole names in the library's model."""
    names = [f"{base_name(model, name)}.{key}" for name, keys in experts.items() for key in keys]
    return sorted(names)


def _target_names(model: nn.Module, names: list[str]) -> list[str]:
    """Last names where these mean the same layers, else whole names."""
    last = {name.rpartition(".")[2] for name in names}
    meant = [n for n, _ in model.named_modules() if n.rpartition(".")[2] in last]
    if set(meant) <= {*names} or set(linear_layers(model)) & set(meant) == {*names}:
        return sorted(last)
    return sorted(base_name(model, name) for name in names)
