"""The files of a model that PEFT itself has wrapped, by `get_peft_model`.

A tuned layer keeps the parts of each adapter in a dict, under the adapter's name. The file leaves
that name out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from plait.models.adapter_files import MAGNITUDE, AdapterForm

COPIES = "modules_to_save"
"""The dict of a module that is trained whole."""


def is_wrapped_by_peft(model: nn.Module) -> bool:
    """Whether a model is one of PEFT's; where it is, the package has been loaded."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def form_of_wrapped(model: Any, params: Iterable[str]) -> AdapterForm | None:
    """The form of the active adapter of a model of PEFT, of which `params` are all parameters.

    It is None of several adapters, of another kind than LoRA, and of trained biases.
    """
    if not is_wrapped_by_peft(model) or not isinstance(model.active_adapter, str):
        return None
    settings = model.peft_config[model.active_adapter]
    config = {**settings.to_dict(), "inference_mode": True}
    if config.get("peft_type") != "LORA" or config.get("bias") != "none":
        return None
    if config.get("base_model_name_or_path") is None:
        base = getattr(model.get_base_model(), "config", None)
        config["base_model_name_or_path"] = getattr(base, "_name_or_path", None) or None
    table = {key: sorted(one) if isinstance(one, set) else one for key, one in config.items()}
    named = {name: _name_in_file(model, name) for name in params}
    return AdapterForm(table, {name: there for name, there in named.items() if there})


def _name_in_file(model: Any, name: str) -> str:
    """The name of a parameter in PEFT's file; empty of one that is not of the active adapter."""
    words = name.split(".")
    for place in range(1, len(words)):
        holder = model.get_submodule(".".join(words[:place]))
        if not isinstance(holder, nn.ModuleDict | nn.ParameterDict):
            continue
        if words[place] == model.active_adapter:
            before, behind = words[:place], words[place + 1 :]
            before = before[:-1] if before[-1] == COPIES else before
            return ".".join(before if before[-1] == MAGNITUDE else [*before, *behind])
    return ""
