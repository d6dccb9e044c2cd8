"""From a table of roles to the modules that have them.

Every misfit between table and model is an error that names it.
`*` in a pattern stands for one name between dots, as in the tables beside the models of this
project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from plait.divided_views import misspelt
from plait.errors import ModelError, nearest
from plait.forwards import is_replaced, runs_forward_of
from plait.parallel.tensor.adapters import parts_of
from plait.parallel.tensor.mode import LinearRule, Mode
from plait.parallel.tensor.placement import parts
from plait.patterns import expression

ROLES = (
    "embedding",
    "position",
    "norm",
    "last_norm",
    "head_norm",
    "column",
    "column_inside",
    "qkv",
    "row",
    "attention",
    "head",
    "region",
    "replicated",
    "router",
    "experts",
    "heads",
    "share",
    "spread",
    "inside",
    "inner_norm",
    "whole",
)
LINEAR = ("column", "column_inside", "qkv", "row", "head")
FUSED = {"qkv": 3}
WHOLE_STREAM = ("whole", "heads", "share", "spread", "inside", "inner_norm", "column_inside")
"""Roles that count on activations which are whole between layers."""
PACKED = ("column", "column_inside")


def word_of(role: str) -> str:
    """The role without what stands behind it: sizes of parts, names of numbers and parameters."""
    return role.partition(" ")[0]


def packed_parts(role: str) -> list[tuple[int, bool]]:
    """The parts of a packed layer, in output features, and whether each is cut.

    >>> packed_parts("column 32+8+8!")
    [(32, True), (8, True), (8, False)]
    """
    word, _, rest = role.partition(" ")
    if word not in PACKED or not rest:
        return []
    return [(int(part.rstrip("!")), not part.endswith("!")) for part in rest.split("+")]


def equal_parts(role: str) -> int | None:
    """The number of parts of a layer that are cut alike; None where parts differ.

    >>> equal_parts("qkv"), equal_parts("column 8+8"), equal_parts("column 8+4")
    (3, 2, None)
    """
    parts = packed_parts(role)
    if not parts:
        return FUSED.get(word_of(role), 1)
    return len(parts) if len(set(parts)) == 1 and parts[0][1] else None


def match(model: nn.Module, roles: Mapping[str, str]) -> dict[str, str]:
    """The role of each module that has one, by name, in the order of the model.

    Raises:
        ModelError: an unknown role or word, a pattern without a module, or one whose parameters
            no role covers. Also a table under which nothing would be split.
    """
    for pattern, role in roles.items():
        if word_of(role) not in ROLES:
            raise ModelError(f"roles['{pattern}'] = '{role}' is no role; {nearest(role, ROLES)}")
        if broken := misspelt(role):
            raise ModelError(
                f"roles['{pattern}'] = '{role}': '{broken}' is no word of views or dropout; write "
                "view/4:2 for the size at index 2 of views to 4 sizes, and dropout/4:1 for the "
                "dim 1 of what is dropped, where it has 4 dims"
            )
    names = [name for name, _ in model.named_modules()]
    expressions = {pattern: expression(pattern) for pattern in roles}
    role_of: dict[str, str] = {}
    unused = dict.fromkeys(roles)
    for name in names:
        for pattern, regex in expressions.items():
            if regex.fullmatch(name):
                role_of.setdefault(name, roles[pattern])
                unused.pop(pattern, None)
    if unused:
        lost = ", ".join(f"'{pattern}' ({roles[pattern]})" for pattern in unused)
        likely = nearest(next(iter(unused)), sorted({_pattern(name) for name in names if name}))
        raise ModelError(f"roles: no module matches {lost}; {likely}")
    _check_covered(model, role_of)
    if "whole" not in role_of.values() and not any(role in LINEAR for role in role_of.values()):
        raise ModelError(
            "tensor parallel would split nothing of this model: "
            "no module has a role column, row, qkv or head"
        )
    return role_of


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _check_covered(model: nn.Module, found: Mapping[str, str]) -> None:
    bare = []
    adapters = {id(part) for module in model.modules() for _, part in parts_of(module)}
    for name, module in model.named_modules():
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        if keys and name not in found and id(module) not in adapters:
            label = name or "the model itself"
            bare.append(f"{label} ({type(module).__name__}: {', '.join(keys)})")
    if bare:
        more = " ..." if len(bare) > 4 else ""
        raise ModelError(
            f"no role covers {len(bare)} modules that have parameters: "
            f"{'; '.join(bare[:4])}{more}. Give each a role in roles = {{...}} "
            f"({', '.join(ROLES)}), 'replicated' where nothing is to be split"
        )


def check_sizes(model: nn.Module, found: Mapping[str, str], mode: Mode, text: str) -> None:
    """Raise `ModelError` with every size that the grid does not divide, and the nearest sizes."""
    broken = list(dict.fromkeys(_misfits(model, found, mode)))
    if broken:
        more = f"\n  and {len(broken) - 8} more" if len(broken) > 8 else ""
        raise ModelError(
            "\n  ".join([f"{text} does not divide the model in {len(broken)} ways:", *broken[:8]])
            + more
        )


def divides(rule: LinearRule, out: int, into: int, number: int = 1) -> bool:
    """Whether a rule cuts the sizes of a layer of so many fused parts evenly."""
    return out // number % parts(rule.out) == 0 and into % parts(rule.into) == 0


def _misfits(model: nn.Module, found: Mapping[str, str], mode: Mode) -> Iterator[str]:
    mode = mode.coarse or mode
    # A table from dataflow has such roles: a trial has cut the heads.
    knows_heads = any(word_of(role) in WHOLE_STREAM for role in found.values())
    for name, role in found.items():
        module = model.get_submodule(name)
        label = f"{_pattern(name)} ({role})"
        if word_of(role) in mode.linear:
            rule = mode.linear[word_of(role)]
            fused = equal_parts(role)
            if fused is None:
                continue
            out, into = linear_shape(module, name)
            what = "the vocabulary" if role == "head" else "output features"
            yield from _misfit(label, what, out // fused, max(parts(rule.out), _size(rule)))
            yield from _misfit(label, "input features", into, parts(rule.into))
            head_size = _head_size(model, name, fused, out == 3 * into)
            if (
                role in {"column", "qkv"}
                and not knows_heads
                and isinstance(head_size, int)
                and (out // fused) % head_size == 0
            ):
                yield from _misfit(label, "heads", out // fused // head_size, _size(rule))
        elif role == "experts":
            last = next(
                param
                for key, param in module.named_parameters(recurse=False)
                if key.startswith("down")
            )
            yield from _misfit(label, "inner features", int(last.shape[2]), mode.size)
        elif role == "embedding":
            rows, columns = (int(size) for size in module.weight.shape)  # type: ignore[union-attr]
            yield from _misfit(label, "the vocabulary", rows, parts(mode.embedding.vocabulary))
            yield from _misfit(label, "features", columns, parts(mode.embedding.features))


def _head_size(model: nn.Module, name: str, fused: int, three: bool) -> object:
    """Output features of a head: of q, k and v together where they lie side by side (GPT-NeoX)."""
    parent = model.get_submodule(name.rpartition(".")[0])
    size = getattr(parent, "head_dim", getattr(parent, "head_size", None))
    return 3 * size if isinstance(size, int) and three and fused == 1 else size


def _size(rule: LinearRule) -> int:
    return 1 if rule.target.features is None else rule.target.features.size


def _misfit(label: str, what: str, size: int, multiple: int) -> Iterator[str]:
    if size % multiple:
        low = size // multiple * multiple
        near = f"the nearest are {low} and {low + multiple}" if low else f"the least is {multiple}"
        yield f"{label}: {what} {size} must be a multiple of {multiple}; {near}"


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out], as in the Conv1D of GPT-2."""
    return type(module).__name__ == "Conv1D"


def linear_shape(module: nn.Module, name: str) -> tuple[int, int]:
    """(out, in) of a linear layer. Raises `ModelError` for a module that is none."""
    if is_replaced(module) or not (is_transposed(module) or runs_forward_of(module, nn.Linear)):
        raise ModelError(
            f"'{name}' has a role of a linear layer and is a {type(module).__name__}; "
            "it must be an nn.Linear (or GPT-2's Conv1D) with the forward of that class"
        )
    first, second = (int(size) for size in module.weight.shape)  # type: ignore[union-attr]
    return (second, first) if is_transposed(module) else (first, second)
