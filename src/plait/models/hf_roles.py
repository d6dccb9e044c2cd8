"""The table of roles of a Hugging Face model: its family's own plan for tensor parallelism, or else
its structure.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.models import adapter_parts, hf_experts
from plait.models.derived.kinds import is_known_norm, is_linear, owns_parameters
from plait.models.derived.table import Ends, Table, derive_or_leave
from plait.models.layers import ScaledEmbedding
from plait.patterns import matches, matches_any
from plait.values import PyTree

STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "head_norm"}
EMBEDDINGS = {"embedding_rowwise", "embedding_colwise"}  # roles of embeddings come from the model
HEADS = ("num_attention_heads", "num_key_value_heads")
GPT2_ROLES = {
    "h.*.attn": "region",
    "h.*.attn.c_attn": "qkv",
    "h.*.attn.c_proj": "row",
    "h.*.mlp.c_fc": "column",
    "h.*.mlp.c_proj": "row",
    "wpe": "position",
    "ln_f": "last_norm",
}


def roles_for(model: nn.Module, size: int = 2, *, is_grid: bool = False) -> dict[str, str]:
    """The table of roles for `size` ranks, or for a grid with sides of `size` ranks.

    It is the library's own plan where that covers the model, else derived from one forward.

    With a size of 1 nothing is derived. Raises `ModelError` where no table is found.
    """
    inner: Any = model.model
    table = table_of(model, size, is_grid=is_grid).roles
    if not table:
        raise ModelError(
            f"transformers has no tensor-parallel plan for {inner.config.model_type}, so "
            f"{hf_experts.a_layer(model)} has no role; give a table, [model] roles = "
            "{pattern: role} or Options(roles=...), or split this model by dp and pp, which need "
            "no roles"
        )
    return table


def table_of(model: nn.Module, size: int, *, is_grid: bool = False) -> Table:
    """The table with its notes; empty where none is derived, as for a size of 1.

    The library's plan cuts every vocabulary and all heads. A model whose numbers do not divide gets
    a derived table, in which these stay whole. So does one whose attention drops: its masks are
    drawn for all heads.
    """
    roles = _of_library(model)
    if size == 1:
        return Table(roles or {})
    fits = roles is not None and _divides(model, roles, size) and not _drops_in_attention(model)
    if not fits or (is_grid and not _can_cut_features(model, roles or {})):
        return derived_table(model, size, is_grid=is_grid)
    return Table(roles or {})


def _divides(model: nn.Module, table: dict[str, str], size: int) -> bool:
    """Whether heads and the rows of embedding and head are divided by a number of ranks."""
    config: Any = model.model.config  # type: ignore[union-attr]
    numbers = [getattr(config, key, None) for key in HEADS]
    ends = [pattern for pattern, role in table.items() if role in ("embedding", "head")]
    for name, module in model.named_modules():
        if any(matches(pattern, name) for pattern in ends):
            numbers.append(module.weight.shape[0])
    return not any(isinstance(number, int) and number % size for number in numbers)


def _can_cut_features(model: nn.Module, table: dict[str, str]) -> bool:
    """Whether activations between layers may be in parts of features: norms and routers say so."""
    if "router" in table.values():
        return False
    norms = [pattern for pattern, role in table.items() if role in ("norm", "last_norm")]
    for name, module in model.named_modules():
        is_norm = any(matches(pattern, name) for pattern in norms)
        if is_norm and not is_known_norm(type(module)):
            return False
    return True


def derived_table(model: nn.Module, size: int, *, is_grid: bool = False) -> Table:
    """The table that the dataflow of one forward gives; its notes name what stays whole.

    Where the forward cannot run on an example, all of the model stays whole.
    """
    inner: Any = model.model
    example = example_of(model)
    ends = Ends(
        _part(inner.get_input_embeddings),
        _part(inner.get_output_embeddings),
        (nn.Embedding, ScaledEmbedding),
    )
    opaque = (hf_experts.AdoptedMixture,)
    run = lambda: model(example)  # noqa: E731
    table = derive_or_leave(model, run, size, ends=ends, opaque=opaque, is_grid=is_grid)
    mixtures = _by_pattern(hf_experts.roles(model))
    has_adapters = any(adapter_parts.has_adapter(module) for module in model.modules())
    roles = {
        name: role
        for name, role in table.roles.items()
        if not (has_adapters and _is_of_adapter(name))
    }
    return Table({**mixtures, **roles, **mixtures}, table.notes)


def _is_of_adapter(name: str) -> bool:
    """Whether a module is a matrix of a layer's adapter."""
    return bool({*name.split(".")[-2:]} & {*adapter_parts.PARTS})


def _part(get: Callable[[], PyTree]) -> nn.Module | None:
    """An embedding or a head; None for a model that has none or does not say which."""
    try:
        found = get()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def example_of(model: nn.Module) -> torch.Tensor:
    """One sample for the forward: eight tokens [1, 8], or a picture [1, channels, height, width] of
    the config's size.
    """
    config: Any = model.model.config  # type: ignore[union-attr]
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        return torch.zeros(1, 8, dtype=torch.int64)
    side = getattr(config, "image_size", None) or 32
    sides = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    return torch.zeros(1, getattr(config, "num_channels", 3), *sides)


def _of_library(model: nn.Module) -> dict[str, str] | None:
    """From the config's own plan for tensor parallelism, or from structure for GPT-2.

    None for a family that has neither, and where words or modules are left over. None for a model
    that makes its positions itself.
    """
    inner: Any = model.model
    if not getattr(model, "gives_positions", True):
        return None
    prefix = f"model.{inner.base_model_prefix}."
    library_plan = getattr(inner.config, "base_model_tp_plan", None) or {}
    if inner.config.model_type == "gpt2":
        table = {f"{prefix}{pattern}": role for pattern, role in GPT2_ROLES.items()}
    elif not library_plan:
        return None
    else:
        names = [name.removeprefix(prefix) for name, _ in model.named_modules()]
        library_plan = {
            pattern: style
            for pattern, style in library_plan.items()
            if ".mlp.experts" not in pattern  # see `hf_experts.roles`
            and style not in EMBEDDINGS
            and matches_any(pattern, names)
        }
        if set(library_plan.values()) - STYLES.keys():
            return None
        table = {f"{prefix}{pattern}": STYLES[style] for pattern, style in library_plan.items()}
        doors = {pattern.rpartition(".")[0] for pattern, role in table.items() if role == "column"}
        table |= {door: "region" for door in doors if "attention" in door or "attn" in door}
        table |= _by_pattern(hf_experts.roles(model))
    for name, module in model.named_modules():
        pattern = _pattern(name)
        if module is inner.get_input_embeddings():
            table[pattern] = "embedding"
        elif module is inner.get_output_embeddings():
            table[pattern] = "head"
        elif "Norm" in type(module).__name__:
            table.setdefault(pattern, "norm")
    return table if _covers(model, table) else None


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _by_pattern(roles: dict[str, str]) -> dict[str, str]:
    return {_pattern(name): role for name, role in roles.items()}


def _covers(model: nn.Module, table: dict[str, str]) -> bool:
    """Whether every module with parameters has a role that its class can take."""
    for name, module in model.named_modules():
        if not owns_parameters(module):
            continue
        if _is_of_adapter(name):  # it is cut with the layer that it belongs to
            continue
        role = next((role for pattern, role in table.items() if matches(pattern, name)), None)
        if role is None or (role in ("column", "row", "head") and not is_linear(module)):
            return False
        scaled = type(module) in (nn.Embedding, ScaledEmbedding)
        if role == "embedding" and not scaled:
            return False
    return True


def _drops_in_attention(model: nn.Module) -> bool:
    """Whether the library's attention drops weights, which its own plan cuts by heads."""
    config: Any = model.model.config  # type: ignore[union-attr]
    return any(getattr(config, key, None) for key in ("attn_pdrop", "attention_dropout"))
