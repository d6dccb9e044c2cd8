"""The table of roles of a Hugging Face model: its family's own plan for tensor parallelism, or else
its structure.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models import hf_experts
from plait.patterns import matches

STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "head_norm"}
GPT2_ROLES = {
    "h.*.attn": "region",
    "h.*.attn.c_attn": "qkv",
    "h.*.attn.c_proj": "row",
    "h.*.mlp.c_fc": "column",
    "h.*.mlp.c_proj": "row",
    "wpe": "position",
    "ln_f": "last_norm",
}


def roles_for(model: nn.Module) -> dict[str, str]:
    """The table of roles: from the config's own plan for tensor parallelism, or from structure for
    GPT-2.

    Raises `ModelError` for a model that has neither, or a plan with a word that is not understood.
    """
    inner: Any = model.model
    prefix = f"model.{inner.base_model_prefix}."
    own = getattr(inner.config, "base_model_tp_plan", None) or {}
    if inner.config.model_type == "gpt2":
        table = {f"{prefix}{pattern}": role for pattern, role in GPT2_ROLES.items()}
    elif not own:
        raise ModelError(
            f"transformers has no tensor-parallel plan for {inner.config.model_type}, so "
            f"{hf_experts.a_layer(model)} has no role; give a table, [model] roles = "
            "{pattern: role} or Options(roles=...), or split this model by dp and pp, which need "
            "no roles"
        )
    else:
        names = [name.removeprefix(prefix) for name, _ in model.named_modules()]
        own = {
            pattern: style
            for pattern, style in own.items()
            if ".mlp.experts" not in pattern  # see `hf_experts.roles`
            and any(matches(pattern, name) for name in names)
        }
        unknown = sorted(set(own.values()) - STYLES.keys())
        if unknown:
            raise ModelError(
                f"the tensor-parallel plan of {inner.config.model_type} says "
                f"{', '.join(unknown)}; give roles = {{...}}"
            )
        table = {f"{prefix}{pattern}": STYLES[style] for pattern, style in own.items()}
        doors = {pattern.rpartition(".")[0] for pattern, role in table.items() if role == "column"}
        table |= {door: "region" for door in doors if "attention" in door or "attn" in door}
        table |= {
            re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): role
            for name, role in hf_experts.roles(model).items()
        }
    _refuse_dropped_attention(inner.config)
    for name, module in model.named_modules():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        if module is inner.get_input_embeddings():
            table[pattern] = "embedding"
        elif module is inner.get_output_embeddings():
            table[pattern] = "head"
        elif "Norm" in type(module).__name__:
            table.setdefault(pattern, "norm")
    return table


def _refuse_dropped_attention(config: Any) -> None:
    """The library's attention draws its own mask, which would be alike on ranks that hold different
    heads.
    """
    for key in ("attn_pdrop", "attention_dropout"):
        if getattr(config, key, None):
            raise ModelError(
                f"{key} = {getattr(config, key)} drops inside the library's attention, which is "
                "split here; set it to 0"
            )
