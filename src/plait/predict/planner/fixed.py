"""Parts of a plan that the user has decided: `--fix "tp8 1f1b"` searches the rest.

A term of plan text fixes what it says and leaves open what it does not. So `tp8` fixes the size of
the tensor axis, and `tp8:1d` its mode as well. A word alone is a schedule, a data strategy or a
tensor mode, such as `1f1b`, `zero3` and `2d`. It may have options, as `local,every8`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from plait.errors import PlanError, nearest
from plait.plan import DataAxis, PipelineAxis, Plan
from plait.plan.axes import CONTEXT_STRATEGIES, REMATS, TENSOR_MODES, BlockRemat
from plait.plan.facts import DATA_STRATEGIES, PIPELINE_SCHEDULES, SCHEDULES
from plait.plan.rules import broken_rules
from plait.predict.planner.space import Degrees

_WORDS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "pp": ("schedule", PIPELINE_SCHEDULES),
    "dp": ("strategy", DATA_STRATEGIES),
    "tp": ("mode", TENSOR_MODES),
    "cp": ("strategy", CONTEXT_STRATEGIES),
}
_OPTIONS: Final = {
    "v": "virtual",
    "sp": "sequence_parallel",
    "depth": "depth",
    "stale": "stale",
    "every": "every",
    "replicate": "replicate",
    "offload": "offload",
}
_NEEDED: Final = {
    "local": ("every", "everyH, the steps between two averagings", "local,every8"),
    "async-server": ("stale", "staleK, the updates that a worker may lag", "async-server,stale2"),
}
"""Options without which a data strategy is none, what they say, and an example."""
_WITH_OPTION: Final = {
    "v": "interleaved,v2",
    "depth": "2.5d,depth2",
    "stale": "async-server,stale2",
    "every": "local,every8",
    "replicate": "zero3,replicate2",
    "offload": "zero1,offload",
}
"""An example of a word that may have each option; `sp` stands alone."""
_AXES: Final = ("dp", "tp", "pp", "ep", "cp", "mb")
ENOUGH: Final = 1 << 20
"""Micro-batches that every schedule has enough of."""
_TERM: Final = re.compile("(pp|tp|dp|ep|cp|mb)[0-9]|remat:|precision:|compile$")


@dataclass(frozen=True)
class Fixed:
    """Decisions: (axis, field) -> value, `mb`, `ep`, `remat` and the like among them."""

    text: str = ""
    values: tuple[tuple[str, str, Any], ...] = ()

    @staticmethod
    def parse(text: str) -> Fixed:
        """The decisions of a text. Raises `PlanError` for a word that decides nothing, or twice."""
        if not isinstance(text, str):
            raise PlanError(f"fix is text such as 'tp8 1f1b', not {text!r}")
        decided: dict[tuple[str, str], Any] = {}
        for word in text.split():
            for axis, name, value in _decisions(word):
                if decided.setdefault((axis, name), value) != value:
                    raise PlanError(
                        f"fix '{text}': {word} says {name} {value}, and {decided[axis, name]} was "
                        "said before; keep one"
                    )
        fixed = Fixed(text, tuple((axis, name, value) for (axis, name), value in decided.items()))
        fixed.check()
        return fixed

    def check(self) -> None:
        """Raises `PlanError` for a data strategy without the option that it needs. An axis of a
        size that no plan can have is refused, too.
        """
        strategy = self.value("dp", "strategy")
        option, meaning, example = _NEEDED.get(strategy, ("", "", ""))
        if option and self.value("dp", option) is None:
            raise PlanError(
                f"fix '{self.text}': {strategy} needs {meaning}; write for example {example}"
            )
        broken = broken_rules(self._sized())
        if broken:
            raise PlanError(f"fix '{self.text}': {broken[0]}")

    def _sized(self) -> Plan:
        """The data axis and the pipeline whose sizes are decided, with micro-batches enough."""
        dp = self._of("dp")
        pp = self._of("pp")
        return Plan(
            dp=DataAxis(**dp) if "size" in dp else DataAxis(),
            pp=PipelineAxis(**pp) if "size" in pp else PipelineAxis(),
            micro_batches=self.value("", "micro_batches") or ENOUGH,
        )

    def _of(self, axis: str) -> dict[str, Any]:
        """The decided fields of an axis."""
        return {name: value for own, name, value in self.values if own == axis}

    def value(self, axis: str, name: str) -> Any:
        """The decided value of a field, or None."""
        return next((v for a, n, v in self.values if (a, n) == (axis, name)), None)

    @property
    def axes(self) -> frozenset[str]:
        """The axes of which something is decided; that of `ep` and `mb` is empty."""
        return frozenset(axis for axis, _, _ in self.values)

    def least_sizes(self) -> dict[str, int]:
        """The fewest ranks of each axis that the decisions ask for, of axes with more than one.

        A schedule needs two stages, and a strategy other than all-reduce two ranks of data and
        context together. Experts borrow ranks of other axes.
        """
        sizes = {axis: self.value(axis, "size") or 1 for axis in _WORDS}
        if self.value("pp", "schedule") is not None:
            sizes["pp"] = max(sizes["pp"], 2)
        shares = self.value("dp", "strategy") not in (None, "allreduce")
        if shares and self.value("dp", "size") is None and sizes["cp"] == 1:
            sizes["dp"] = 2
        return {axis: size for axis, size in sizes.items() if size > 1}

    def _holds(self, axis: str, record: object) -> bool:
        return all(getattr(record, name) == value for a, name, value in self.values if a == axis)

    def allows_degrees(self, one: Degrees, global_batch: int) -> bool:
        """Whether degrees are as decided; a schedule or a sharded strategy needs its axis."""
        schedule = self.value("pp", "schedule")
        strategy = self.value("dp", "strategy")
        shared = one.dp * one.cp.size
        return all(
            (
                self._holds("tp", one.tp),
                self._holds("cp", one.cp),
                self.value("pp", "size") in (None, one.pp),
                self.value("dp", "size") in (None, one.dp),
                self.value("", "ep") in (None, one.ep),
                schedule is None or one.pp > 1,
                strategy is None or strategy == "allreduce" or shared > 1,
                one.dp * (self.value("", "micro_batches") or 1) <= global_batch,
            )
        )

    def allows(self, plan: Plan) -> bool:
        """Whether a whole plan is as decided."""
        axes = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "": plan}
        if self.value("pp", "schedule") is not None and plan.pp.size == 1:
            return False
        return all(self._holds(axis, record) for axis, record in axes.items())

    def counts(self, counts: list[int]) -> list[int]:
        """The numbers of micro-batches that are left."""
        decided = self.value("", "micro_batches")
        return counts if decided is None else [decided]

    def remats(self) -> tuple[BlockRemat, ...]:
        """The recomputation that is left, least first."""
        decided = self.value("", "remat")
        return REMATS if decided is None else (decided,)

    def data_axes(self, size: int, offered: list[DataAxis]) -> list[DataAxis]:
        """The data axes that are left; a decided one that is not offered is one more."""
        left = [axis for axis in offered if self._holds("dp", axis)]
        strategy = self.value("dp", "strategy")
        if left or strategy is None:
            return left
        options = {n: v for a, n, v in self.values if a == "dp" and n not in {"size", "strategy"}}
        own = replace(DataAxis(size, strategy), **options)
        return [] if broken_rules(Plan(dp=own)) else [own]

    def pipelines(
        self, size: int, micro_batches: int, others: Iterator[PipelineAxis]
    ) -> list[PipelineAxis]:
        """The schedules that are left beside the default. A decided one is always there, where it
        has a shape of so many micro-batches.
        """
        left = [pipeline for pipeline in others if self._holds("pp", pipeline)]
        schedule = self.value("pp", "schedule")
        if left or schedule is None:
            return left
        virtual = self.value("pp", "virtual") or 0
        if SCHEDULES[schedule].needs_virtual and not virtual:
            return []
        own = PipelineAxis(size, schedule, virtual)
        return [] if broken_rules(Plan(pp=own, micro_batches=micro_batches)) else [own]

    def allows_pipeline(self, pipeline: PipelineAxis) -> bool:
        """Whether a pipeline is as decided."""
        return pipeline.size == 1 or self._holds("pp", pipeline)


NOTHING: Final = Fixed()


def _decisions(word: str) -> Iterator[tuple[str, str, Any]]:
    """(axis, field, value) of a word; the axis of `mb`, `remat` and their like is empty."""
    first = word.partition(",")[0]
    homes = [axis for axis, (_, words) in _WORDS.items() if first in words]
    if len(homes) > 1:
        raise PlanError(
            f"fix '{word}': it is a word of {' and '.join(homes)}; write {homes[-1]}2:{word}"
        )
    if homes and first == word:
        yield homes[0], _WORDS[homes[0]][0], word
        return
    if homes:
        yield from _pieces(homes[0], _axis(homes[0], word), word)
        return
    if word == "sp":
        yield "tp", "sequence_parallel", True
        return
    if not _TERM.match(word):
        raise PlanError(f"fix '{word}': {_no_decision(word)}")
    plan = Plan.parse(word)
    head, _, tail = word.partition(":")
    if word == "remat:auto":
        raise PlanError(
            "fix 'remat:auto': a search compares plans whose blocks are alike; fix remat:full or "
            "remat:selective, and ask plait estimate what remat:auto makes of the plan"
        )
    if word == "compile" or head in {"remat", "precision"}:
        yield "", head, getattr(plan, head)
        return
    axis = head[:2]
    if axis in {"mb", "ep"}:
        name = {"mb": "micro_batches", "ep": "ep"}[axis]
        yield "", name, getattr(plan, name)
        return
    record: Any = getattr(plan, axis)
    yield axis, "size", record.size
    if tail:
        yield from _pieces(axis, record, tail)


def _no_decision(word: str) -> str:
    """The reason why a word decides nothing, and what to write."""
    option = word.rstrip("0123456789")
    if option in _WITH_OPTION:
        return f"it is an option, which needs its strategy; write {_WITH_OPTION[option]}"
    if word in _AXES:
        return f"its size is missing; write {word}2"
    if word.lower() != word:
        return f"plans are written in small letters; write {word.lower()}"
    known = dict.fromkeys(one for _, words in _WORDS.values() for one in words)
    terms = "or a term of a plan, as tp8, pp4:1f1b, mb8 or remat:full"
    return f"it decides nothing; {nearest(word, [*known, 'sp'])}; {terms}"


def _axis(axis: str, tail: str) -> Any:
    """The axis of a word with options, on the fewest ranks that it can have."""
    mode = tail.partition(",")[0]
    size = {"2d": 4, "2.5d": 4, "3d": 8}.get(mode, 2)
    return getattr(Plan.parse(f"{axis}{size}:{tail}"), axis)


def _pieces(axis: str, record: Any, tail: str) -> Iterator[tuple[str, str, Any]]:
    """The decisions of the word and the options behind the size of an axis."""
    for piece in tail.split(","):
        is_word = piece in _WORDS[axis][1]
        name = _WORDS[axis][0] if is_word else _OPTIONS[re.sub("[0-9]+$", "", piece)]
        yield axis, name, getattr(record, name)
