"""Models as plain single-device PyTorch, and what strategies must know of them, as data beside the
code.

Each file has `BLOCKS`, `CHAIN` and `ROLES`. `BLOCKS` is the pattern of the repeated blocks, which
pipelines and ZeRO count in. `CHAIN` has the patterns of the modules whose composition is the
forward, one tensor from each to the next. So a model can be cut between any two links. `ROLES` maps
a module pattern to a role. In a pattern `*` stands for one name between dots.

- `embedding`: token numbers -> vectors; the table's rows are the vocabulary.
- `position`: knows where in the sequence a token stands; `forward` takes `positions` [S] when they
  are not 0 .. S-1.
- `norm`: normalises each feature vector.
- `column`: first half of a pair of linear layers: the output features may be split.
- `row`: second half: the input features are split as the `column` before left them.
- `attention`: q, k, v [B, heads, S, head size] -> the same; no parameters; heads are independent,
  positions are not.
- `head`: vectors -> logits over the vocabulary, no bias.
- `router`: chooses experts; its parameters compute alike on every tensor-parallel rank.
- `experts`: rows sorted by expert, and their counts -> rows; parameters `gate`, `up`, `down`
  [experts, out, in].
- `replicated`: computes alike on every tensor-parallel rank.

Modules without a role own no parameters and act on each element alone.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from plait.errors import ModelError, nearest
from plait.patterns import matches, matches_any
from plait.values import JsonObject

CLASSES = {"mlp": "MLP", "gpt": "GPT", "llama": "Llama", "resnet": "ResNet", "fno": "FNO"}
SPECIAL = ("hf",)
OF_FIELDS = frozenset({"fno"})
"""Families whose outputs and targets are fields of numbers: they minimise the squared error."""


def make(name: str, **keys: object) -> nn.Module:
    """The model `name` with the keys of its config, on the current default device; keys that are
    None count as absent.

    Raises `ModelError` for a name or key that is unknown, missing or impossible.
    """
    given = {key: value for key, value in keys.items() if value is not None}
    if name == "hf":
        return _call(importlib.import_module("plait.models.hf").make, name, given)
    return _call(getattr(module_of(name), CLASSES[name]), name, given)


def hf_vocabulary(config: Any) -> int | None:
    """The number of tokens of a Hugging Face config, or of its family where it says none."""
    found: int | None = importlib.import_module("plait.models.hf").vocabulary(config)
    return found


def hf_config(config: Any) -> JsonObject:
    """The table of a Hugging Face config, wherever it is. Raises `ModelError` for none."""
    table: JsonObject = importlib.import_module("plait.models.hf").read_config(config)
    return table


def roles_of(name: str) -> dict[str, str]:
    """From module pattern to role, for a model of this project; empty for a model that has no
    table.
    """
    return dict(module_of(name).ROLES) if name in CLASSES else {}


def roles_for(model: nn.Module, size: int = 2, *, is_grid: bool = False) -> dict[str, str]:
    """Roles by module pattern, for `size` ranks: the table beside a model's class, or one derived
    for Hugging Face models.

    On a grid `size` is its side. Raises `ModelError` for a model that has none.
    """
    home = _home_of(model)
    if _derives(home):
        return dict(home.roles_for(model, size, is_grid=is_grid))
    table = getattr(home, "ROLES", None)
    if not isinstance(table, Mapping):
        if home.__name__.startswith("transformers."):
            raise ModelError(
                f"a {type(model).__name__} gets its table of roles from "
                "plait.models.hf.HuggingFace(model), which takes token "
                "numbers and gives logits; pass that, or Options(roles=...)"
            )
        raise ModelError(
            f"this plan needs a table of roles for {type(model).__name__}: [model] roles = "
            f"{{...}}, Options(roles=...), "
            f"or ROLES = {{...}} beside the class in {home.__name__}"
        )
    # A table is of a family, of which not every model has every module.
    names = [name for name, _ in model.named_modules()]
    return {pattern: role for pattern, role in table.items() if matches_any(pattern, names)}


def has_roles(model: nn.Module) -> bool:
    """Whether a table stands beside a model's class, or its family derives one."""
    home = _home_of(model)
    return _derives(home) or isinstance(getattr(home, "ROLES", None), Mapping)


def _home_of(model: nn.Module) -> ModuleType:
    """The module of a model's class.

    A file that was run by its path may be no entry of `sys.modules`; it has no table.
    """
    name = type(model).__module__
    return sys.modules.get(name) or ModuleType(name)


def _derives(home: ModuleType) -> bool:
    return home.__name__.startswith("plait.models.") and hasattr(home, "roles_for")


def blocks_of(name: str) -> str | None:
    """The pattern of the repeated blocks; None for a model that has no table."""
    return str(module_of(name).BLOCKS) if name in CLASSES else None


def chain_of(name: str) -> tuple[str, ...]:
    """The patterns whose modules, in this order, compose to the forward; empty for a model that has
    no table.
    """
    return tuple(module_of(name).CHAIN) if name in CLASSES else ()


def match(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern.

    >>> match("blocks.*.norm1", "blocks.12.norm1"), match("blocks.*", "blocks.0.norm1")
    (True, False)
    """
    return matches(pattern, name)


def role(name: str, roles: Mapping[str, str]) -> str | None:
    """The role of the module `name`, by the first pattern that fits."""
    return next((role for pattern, role in roles.items() if match(pattern, name)), None)


def links(model: nn.Module, chain: tuple[str, ...]) -> list[str]:
    """Names of the modules that `chain` means, in the order in which the forward calls them."""
    names = [name for name, _ in model.named_modules()]
    return [name for pattern in chain for name in names if match(pattern, name)]


def module_of(name: str) -> ModuleType:
    """The module that has the family of that name. Raises `ModelError` for one that is unknown."""
    if name not in CLASSES:
        raise ModelError(f"there is no model {name!r}; {nearest(name, [*CLASSES, *SPECIAL])}")
    return importlib.import_module(f"plait.models.{name}")


def _call(constructor: Any, name: str, keys: JsonObject) -> nn.Module:
    """Call with a check of the keys first, so that a TypeError from inside stays what it is."""
    known = {
        key: p
        for key, p in inspect.signature(constructor).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }
    known |= getattr(constructor, "more_keys", {})
    for key in keys.keys() - known.keys():
        raise ModelError(f"model {name!r} has no key {key!r}; {nearest(key, known)}")
    missing = [
        key
        for key, parameter in known.items()
        if parameter.default is parameter.empty and key not in keys
    ]
    if missing:
        raise ModelError(f"model {name!r} needs {', '.join(missing)}")
    model: nn.Module = constructor(**keys)
    return model
