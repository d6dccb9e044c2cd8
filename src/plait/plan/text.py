"""The text form of a plan: `parse_terms` and `plan_text`, a pair of inverses.

Parsing is syntax alone. It says which terms cannot be read, all of them at once, and leaves to
`rules` whether the numbers fit. Printing is canonical: equal plans have equal text, and what is
default is not written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from plait.errors import PlanError, nearest
from plait.plan import axes
from plait.plan.axes import ContextAxis, DataAxis, PipelineAxis, TensorAxis
from plait.plan.rules import broken_axis_rules
from plait.plan.terms import Terms
from plait.values import JsonObject, JsonValue

_SHAPE: Final = re.compile(r"(?P<name>[a-z]+)(?P<number>[0-9]*)(?P<tail>[:,].*)?")
_OPTION: Final = re.compile(r"(?P<name>[a-z]+)(?P<number>[0-9]+)?")
_MAX_DIGITS: Final = 9
_MOST_SHOWN: Final = 60
"""The characters of a text that a message repeats."""

# axis -> (its words, option -> (field, least number; None for an option without a number))
_WORDS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "dp": ("strategy", axes.DATA_STRATEGIES),
    "tp": ("mode", axes.TENSOR_MODES),
    "pp": ("schedule", axes.PIPELINE_SCHEDULES),
    "cp": ("strategy", axes.CONTEXT_STRATEGIES),
}
_OPTIONS: Final[dict[str, dict[str, tuple[str, int | None]]]] = {
    "dp": {
        "stale": ("stale", 0),
        "every": ("every", 1),
        "replicate": ("replicate", 1),
        "offload": ("offload", None),
    },
    "tp": {"sp": ("sequence_parallel", None), "depth": ("depth", 1)},
    "pp": {"v": ("virtual", 1)},
    "cp": {},
}
_RECORDS: Final[dict[str, Callable[..., object]]] = {
    "dp": DataAxis,
    "tp": TensorAxis,
    "pp": PipelineAxis,
    "cp": ContextAxis,
}
_COUNTS: Final = {"ep": "ep", "mb": "micro_batches"}
_CHOICES: Final = {"remat": axes.REMAT_WORDS, "precision": axes.PRECISIONS}
_ELSEWHERE: Final = {
    "ddp": "dp2",
    "fsdp": "dp2:zero3",
    "hsdp": "dp4:zero3,replicate2",
    "zero": "dp2:zero1, dp2:zero2 or dp2:zero3",
    "data": "dp2",
    "tensor": "tp2",
    "pipeline": "pp2",
    "expert": "ep2",
    "context": "cp2",
    "bfloat16": "precision:bf16",
    "fp16": "precision:bf16",
    "float16": "precision:bf16",
    "half": "precision:bf16",
    "fp32": "precision:float32",
    "float": "precision:float32",
    "fp64": "precision:float64",
    "double": "precision:float64",
}
"""Words of other libraries, and the terms that they mean."""
_OPTIONS_ELSEWHERE: Final = {
    "ddp": "dpN",
    "fsdp": "dpN:zero3",
    "hsdp": "dpN:zero3,replicateM",
    "full_shard": "dpN:zero3",
    "shard_grad_op": "dpN:zero2",
    "no_shard": "dpN",
    "zero": "dpN:zero1, dpN:zero2 or dpN:zero3",
    "zero0": "dpN",
}
"""Words that other libraries have for what stands behind `dpN:`."""
_GRIDS: Final = {"2d": "tp4:2d", "2.5d": "tp8:2.5d,depth2", "3d": "tp8:3d"}
"""Words of tensor modes, for which two ranks are no grid, and their least plans."""
_TERMS: Final = ("pp", "tp", "dp", "ep", "cp", "mb", "remat", "precision", "compile")


class _BadTermError(Exception):
    """The bare fact; `parse_terms` adds the term and collects."""


def parse_terms(text: str) -> JsonObject:
    """The keyword arguments of `Plan` that a text means.

    Raises `PlanError` with one line for each term that cannot be read.
    """
    if not isinstance(text, str):
        raise PlanError(f"a plan is text such as 'dp2:zero3', not {type(text).__name__} {text!r}")
    fields: JsonObject = {}
    seen: dict[str, str] = {}
    bad: list[str] = []
    for term in text.split():
        try:
            name, value = _parse_term(term)
        except _BadTermError as fact:
            bad.append(f"{_shown(term)}: {fact}")
            continue
        if name in seen:
            bad.append(f"{term}: {name} is given twice, {seen[name]} and {term}; keep one")
        else:
            seen[name] = term
            fields[_COUNTS.get(name, name)] = value
            if name in _RECORDS:
                bad += broken_axis_rules(value)
    if bad:
        raise PlanError(_report(text, bad))
    return fields


def _report(text: str, bad: list[str]) -> str:
    if len(bad) == 1:
        return f"plan '{_shown(text)}': {bad[0].removeprefix(f'{_shown(text.strip())}: ')}"
    return "\n  ".join([f"plan '{_shown(text)}' has {len(bad)} faults:", *bad])


def _shown(text: str) -> str:
    """A text as messages repeat it: the beginning alone of one that is long."""
    if len(text) <= 2 * _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _parse_term(term: str) -> tuple[str, JsonValue]:
    shape = _SHAPE.fullmatch(term)
    if shape is None:
        raise _BadTermError(f"this is no term; {_hint(term)}")
    name = shape["name"]
    number = shape["number"]
    tail = shape["tail"] or ""
    if name not in _TERMS:
        raise _BadTermError(f"unknown term; {_hint(term)}")
    if name == "compile":
        if number or tail:
            raise _BadTermError("compile stands alone; write compile")
        return name, True
    if name in _CHOICES:
        return name, _choice(name, number, tail)
    size = _count(name, number, least=1, example=f"{name}2")
    if name in _COUNTS:
        if tail:
            raise _BadTermError(f"{name} has no options; write {name}{size}")
        return name, size
    return name, _axis(name, size, tail)


def _choice(name: str, number: str, tail: str) -> str:
    known = _CHOICES[name]
    if number or not tail.startswith(":"):
        raise _BadTermError(f"{name} needs one word after a colon, {name}:{'|'.join(known)}")
    word = tail[1:]
    if word not in known:
        meant = _ELSEWHERE.get(word.lower(), "")
        if meant.startswith(f"{name}:"):
            hint = f"{word} of other libraries is written {meant}"
        elif word.lower() in known:
            hint = f"words are lower case: write {name}:{word.lower()}"
        else:
            hint = nearest(word, known)
        raise _BadTermError(f"unknown {name} '{_shown(word)}'; {hint}")
    return word


def _axis(name: str, size: int, tail: str) -> Any:
    """The record of one axis: at most one word and any options, in any order."""
    fields: JsonObject = {"size": size}
    kind, words = _WORDS[name]
    for piece in tail[1:].split(",") if tail else []:
        if piece in words:
            field = kind
            value = piece
        else:
            field, value = _option(name, piece)
        if field in fields:
            raise _BadTermError(
                f"{name} has one {field.replace('_', ' ')}, and '{piece}' is a second"
            )
        fields[field] = value
    return _RECORDS[name](**fields)


def _option(axis: str, piece: str) -> tuple[str, JsonValue]:
    options = _OPTIONS[axis]
    shape = _OPTION.fullmatch(piece)
    option = shape["name"] if shape else ""
    number = (shape["number"] or "") if shape else ""
    if option not in options:
        raise _BadTermError(_unknown_option(axis, piece))
    field, least = options[option]
    if least is None:
        if number:
            raise _BadTermError(f"{option} takes no number; write {option}")
        return field, True
    return field, _count(option, number, least=least, example=f"{option}2")


def _unknown_option(axis: str, piece: str) -> str:
    kind, words = _WORDS[axis]
    if not piece:
        return (
            f"a {kind} or an option is missing beside a colon or comma; known: {', '.join(words)}"
        )
    if _SHAPE.fullmatch(piece) and re.split("[0-9:]", piece)[0] in _TERMS:
        return f"'{_shown(piece)}' is a term of its own; separate terms by blanks"
    spelled = [
        f"{name}{'' if least is None else 'N'}" for name, (_, least) in _OPTIONS[axis].items()
    ]
    fact = f"unknown {kind} or option '{_shown(piece)}' of {axis}"
    meant = _OPTIONS_ELSEWHERE.get(piece.lower()) if axis == "dp" else None
    if meant is not None:
        return f"{fact}; {piece} of other libraries is written {meant}"
    if piece != piece.lower() and piece.lower() in words:
        return f"{fact}; words are lower case: write {piece.lower()}"
    return f"{fact}; {nearest(piece, [*words, *spelled])}"


def _count(name: str, digits: str, *, least: int, example: str) -> int:
    if not digits:
        raise _BadTermError(f"{name} needs a number, as in {example}")
    if len(digits.lstrip("0")) > _MAX_DIGITS:
        raise _BadTermError(
            f"{name} has a number of {len(digits)} digits; the largest that is read has "
            f"{_MAX_DIGITS}"
        )
    number = int(digits)
    if number < least:
        raise _BadTermError(f"{name}{number} is too small; the least is {name}{least}")
    return number


def _hint(term: str) -> str:
    """The term that was probably meant: with its axis, in lower case, or the nearest one."""
    if term == "auto":
        return (
            "'auto' asks the planner, which needs a model and a cluster; a plan itself names axes, "
            "as in dp2:zero3"
        )
    head = re.split("[:,]", term)[0]
    for axis, (kind, words) in _WORDS.items():
        if head in words:
            written = _GRIDS.get(term, f"{axis}2:{_shown(term)}")
            return f"{head} is a {kind} of {axis}; write {written}"
    for choice, words in _CHOICES.items():
        if head in words:
            return f"write {choice}:{head}"
    if term != term.lower():
        return f"terms are lower case; did you mean '{_shown(term.lower())}'?"
    return _nearest_term(head)


def _nearest_term(head: str) -> str:
    """The term that a word of another library means, or the nearest one."""
    word = re.split("[^a-z]", head)[0] or head
    for meant in (head, word):
        if meant in _ELSEWHERE:
            return f"{meant} of other libraries is written {_ELSEWHERE[meant]}"
    found = nearest(word, _TERMS)
    counted = next((name for name in (*_WORDS, *_COUNTS) if f"'{name}'" in found), None)
    if counted:
        return f"{found} It stands with its number, as in {counted}2"
    return found if found.endswith("?") else f"{found}; a plan is text such as 'dp2:zero3 tp2 mb4'"


def plan_text(plan: Terms, *, shows_micro_batches: bool = False) -> str:
    """The canonical text: pp, tp, dp, ep, cp, mb, remat, precision, compile; `dp1` for the single
    device.

    `shows_micro_batches`: also where their number is the default.
    """
    terms = [str(axis) for axis in (plan.pp, plan.tp, plan.dp) if axis != type(axis)()]
    terms += [f"ep{plan.ep}"] if plan.ep != 1 else []
    terms += [str(plan.cp)] if plan.cp != ContextAxis() else []
    if shows_micro_batches or plan.micro_batches != plan.default_micro_batches:
        terms.append(f"mb{plan.micro_batches}")
    terms += [f"remat:{plan.remat}"] if plan.remat != "none" else []
    terms += [f"precision:{plan.precision}"] if plan.precision != "float32" else []
    terms += ["compile"] if plan.compile else []
    return " ".join(terms) or "dp1"
