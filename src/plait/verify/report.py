"""The verdict: what was compared, how far apart it is, what it looks like, and who is to blame.

`ok` is true only when every error is within the tolerance and nothing made the comparison vacuous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.values import JsonMapping, JsonObject
from plait.verify.diagnosis.finding import Finding
from plait.verify.record.compare import UPDATE_FACTOR, Difference

if TYPE_CHECKING:
    from plait.verify.outside.modules import ModuleError

PARAM_KINDS = ("param", "start", "replica", "buffer")


@dataclass(frozen=True)
class Report:
    """A parallel run against its reference. Errors are relative (see `compare`), the largest over
    steps, ranks and tensors.
    """

    differences: Sequence[Difference]
    refusals: Sequence[str]
    findings: Sequence[Finding]
    tolerance: float
    num_steps: int
    plan: str = ""
    world_size: int = 1
    title: str = ""
    notes: Sequence[str] = ()
    parts: Sequence[Report] = field(
        default_factory=tuple
    )  # one a probe, when this is the report of several
    paths_not_walked: Sequence[str] = ()
    modules: Sequence[ModuleError] = ()  # in forward order, where they were watched
    seconds: float = 0.0  # of this part, on its first rank
    module_slack: float = 1e-6  # the largest error of a module that passes

    @property
    def ok(self) -> bool:
        """Whether every error passes, here and in the parts, and the comparison was a real one."""
        return not self.refusals and not self.failed and all(part.ok for part in self.parts)

    @property
    def failed(self) -> list[Difference]:
        """The comparisons that are out of tolerance, worst first."""
        wrong = [one for one in self.differences if not one.error <= self.limit_of(one)]
        return sorted(wrong, key=lambda one: (one.step, -one.error))

    def limit(self, kind: str) -> float:
        """The largest error that passes for one kind."""
        return self.tolerance * UPDATE_FACTOR if kind == "update" else self.tolerance

    def limit_of(self, one: Difference) -> float:
        """The largest error that passes for one comparison."""
        return self.limit(one.kind) if one.limit is None else max(one.limit, self.tolerance)

    def error(self, *kinds: str) -> float:
        """The largest error of these kinds, over the parts of this tolerance too."""
        own = [one.error for one in self.differences if one.kind in kinds]
        return max([*own, *(part.error(*kinds) for part in self._alike())], default=0.0)

    def passes(self, *kinds: str) -> float:
        """The largest error that any comparison of these kinds may have."""
        own = [self.limit_of(one) for one in self.differences if one.kind in kinds]
        return max([*own, *(part.passes(*kinds) for part in self._alike())], default=self.tolerance)

    def compares(self, kind: str) -> bool:
        """Whether any number of this kind was compared, here or in a part."""
        own = any(one.kind == kind for one in self.differences)
        return own or any(part.compares(kind) for part in self.parts)

    def _alike(self) -> list[Report]:
        return [part for part in self.parts if part.tolerance == self.tolerance]

    @property
    def worst(self) -> Difference | None:
        """The largest error relative to what passes; once all pass, of this tolerance alone."""
        ranked = self._ranked()
        return max(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def _ranked(self) -> list[tuple[float, Difference]]:
        """Each difference, with its error in units of what passes."""
        own = [(one.error / self.limit_of(one), one) for one in self.differences]
        parts = self._alike() if self.ok else self.parts
        return own + [pair for part in parts for pair in part._ranked()]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes and options that the findings blame, surest first."""
        return tuple(dict.fromkeys(one.axis for one in self.all_findings if one.axis))

    @property
    def all_findings(self) -> list[Finding]:
        """Own findings and those of the parts, surest first, each once."""
        found = {one.text: one for part in self.parts for one in part.all_findings} | {
            one.text: one for one in self.findings
        }
        return sorted(found.values(), key=lambda one: -one.confidence)

    def as_dict(self) -> JsonObject:
        """The record of the contract; infinite errors are the string `inf`, as JSON has none."""
        worst = self.worst
        return {
            "ok": self.ok,
            "loss_error": _json(self.error("loss", "count")),
            "grad_error": _json(self.error("grad", "grad_norm")),
            "param_error": _json(self.error(*PARAM_KINDS)),
            "update_error": _json(self.error("update")),
            "worst": {"name": worst.name, "kind": worst.kind, "error": _json(worst.error)}
            if worst
            else None,
            "plan": self.plan,
            "world_size": self.world_size,
            "steps": self.num_steps,
            "tolerance": self.tolerance,
            "refusals": [
                *self.refusals,
                *(f"{part.title}: {text}" for part in self.parts for text in part.refusals),
            ],
            "findings": [one.as_dict() for one in self.all_findings],
            "notes": list(self.notes),
            "paths_not_walked": list(self.paths_not_walked),
            "probes": [_probe(part) for part in self.parts],
        }

    def text(self) -> str:
        """For people: the verdict first, then the numbers, then what it looks like."""
        name = self.plan or self.title or "the parallel step"
        verdict = "equal to one device" if self.ok else "NOT equal to one device"
        lines = [f"{name}: {verdict} ({self.num_steps} steps, {self.world_size} ranks)"]
        for label, kinds in (
            ("loss", ("loss", "count")),
            ("gradients", ("grad", "grad_norm")),
            ("parameters", PARAM_KINDS),
        ):
            relative_errors = (
                f"relative error {self.error(*kinds):.1e}   (passes up to "
                f"{self.passes(*kinds):.0e})"
            )
            is_known = self.refusals or self.compares(kinds[0])
            lines.append(f"  {label:<11} {relative_errors if is_known else 'not compared'}")
        if not self.ok and (worst := self.worst):
            where = "" if worst.rank is None else f" on rank {worst.rank}"
            lines.append(
                f"  worst: {worst.kind} {worst.name}{where} in step {worst.step}: {worst.error:.3g}"
            )
        lines += [f"  refused: {text}" for text in self.refusals]
        lines += [f"  -> {one.text}" for one in self.all_findings]
        lines += [
            f"  probe {part.title:<18} {'ok' if part.ok else 'FAILED':<6} {part.seconds:6.1f} s"
            for part in self.parts
        ]
        lines += [
            f"  refused in probe {part.title}: {text}"
            for part in self.parts
            for text in part.refusals
        ]
        lines += [f"  not walked: {name}" for name in self.paths_not_walked]
        told = [*self.notes, *(note for part in self.parts for note in part.notes)]
        lines += [f"  note: {note}" for note in dict.fromkeys(told)]
        return "\n".join(lines)


def _json(error: float) -> float | str:
    return error if math.isfinite(error) else "inf"


def _probe(part: Report) -> JsonMapping:
    return {
        "name": part.title,
        "ok": part.ok,
        "loss_error": _json(part.error("loss", "count")),
        "grad_error": _json(part.error("grad", "grad_norm")),
        "param_error": _json(part.error(*PARAM_KINDS)),
        "seconds": round(part.seconds, 2),
        "notes": list(part.notes),
    }
