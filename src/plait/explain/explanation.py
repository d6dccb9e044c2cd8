"""The explanation of a term: the recorded run of its small case, beside formula and paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from plait.explain.case import MOMENTUM, Case, case_of
from plait.explain.notebook import NotedOperation, NotedTensor
from plait.explain.papers import OPERATIONS, PaperSource, sources
from plait.explain.recording import RankRecording, record
from plait.explain.steps import Step, steps_of
from plait.mesh import Shard
from plait.parallel.pipeline.actions import Action, Schedule
from plait.parallel.pipeline.clock import unit, walk
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.simulate import Simulation, simulate
from plait.values import JsonObject


@dataclass(frozen=True)
class Explanation:
    """A term, its small case, and the recordings of that case by rank."""

    term: str
    case: Case
    recordings: list[RankRecording]

    @property
    def source(self) -> PaperSource:
        """Idea, formula and paper."""
        return sources()[self.case.word]

    @cached_property
    def steps(self) -> list[Step]:
        """The operations of all ranks, in the order of the run."""
        start = None
        if self.schedule is not None:
            events = walk(self.schedule, unit).events
            start = {str(event.action): event.start for event in reversed(events)}
        found = steps_of(self.recordings, start)
        return [step for step in found if step.operation != "receive"]

    @cached_property
    def schedule(self) -> Schedule | None:
        """The actions that the ranks of a pipeline have walked; None without a pipeline."""
        pp = self.case.plan.pp
        if pp.size == 1:
            return None
        generated = make(
            pp.schedule,
            pp.size,
            self.case.plan.micro_batches,
            pp.virtual,
            num_steps=self.case.num_steps,
        )
        walked = [[Action.parse(text) for _, text in each.actions] for each in self.recordings]
        return generated.with_ranks(walked)

    @cached_property
    def simulation(self) -> Simulation | None:
        """Bubble and memory of the walked actions, with equal times."""
        return None if self.schedule is None else simulate(self.schedule)

    @cached_property
    def routing(self) -> list[JsonObject]:
        """The tokens of each rank with their experts; None is the expert of a dropped token."""
        return [
            {
                "rank": recording.rank,
                "tokens": routed.tokens.tolist(),
                "experts": routed.experts,
                "weights": routed.weights,
            }
            for recording in self.recordings
            for routed in recording.routed
        ]

    def sent(self) -> dict[str, tuple[int, int]]:
        """(number, bytes) of what all ranks sent, by operation, as the steps have it."""
        totals: dict[str, tuple[int, int]] = {}
        for step in self.steps:
            if step.axis:
                num, num_bytes = totals.get(step.operation, (0, 0))
                totals[step.operation] = num + len(step.notes), num_bytes + step.bytes
        return totals

    def counted(self) -> dict[str, tuple[int, int]]:
        """(number, bytes) of what all ranks sent, by operation, as their ledgers counted."""
        totals: dict[str, tuple[int, int]] = {}
        for recording in self.recordings:
            for (_, op), count in recording.ledger.counts.items():
                num, num_bytes = totals.get(op, (0, 0))
                totals[op] = num + count.num, num_bytes + count.bytes
        return totals

    def as_dict(self) -> JsonObject:
        """The record, for JSON."""
        source = self.source
        plan = self.case.plan
        record: JsonObject = {
            "term": self.term,
            "plan": str(plan),
            "ranks": plan.world_size,
            "title": source.title,
            "idea": source.idea,
            "formula": source.formula,
            "paper": source.paper,
            "case": self.case.about,
            "learning_rate": self.case.learning_rate,
            "momentum": MOMENTUM,
            "losses": self.recordings[0].losses,
            "holds": [self._holds(each) for each in self.recordings],
            "steps": [self._step(number, step) for number, step in enumerate(self.steps, 1)],
            "sent": _totals(self.sent()),
            "counted": _totals(self.counted()),
            "after": [[_block(shard) for shard in each.after] for each in self.recordings],
        }
        if self.routing:
            record["routing"] = self.routing
        if self.schedule is not None and self.simulation is not None:
            record["schedule"] = _schedule(self.schedule, self.simulation)
        return record

    def _holds(self, recording: RankRecording) -> JsonObject:
        return {
            "rank": recording.rank,
            "weights": [_block(shard) for shard in recording.weights],
            "updates": [_block(shard) for shard in recording.updated],
            "memory_bytes": recording.memory,
        }

    def _step(self, number: int, step: Step) -> JsonObject:
        return {
            "number": number,
            "step": step.step,
            "phase": step.phase,
            "action": step.action,
            "operation": step.operation,
            "axis": step.axis,
            "ranks": step.ranks,
            "groups": [list(group) for group in step.groups],
            "shape": step.shape,
            "bytes": step.bytes,
            "values": [_operation(note) for note in step.notes],
            "formula": OPERATIONS[step.operation],
            "paper": self.source.paper,
        }


def explain(term: str) -> Explanation:
    """Run the small case of a term on simulated ranks. Errors: `PlanError`, `NotAvailable`."""
    case = case_of(term)
    return Explanation(term, case, record(case))


def _totals(totals: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    return {op: {"num": num, "bytes": size} for op, (num, size) in totals.items()}


def _operation(note: NotedOperation) -> JsonObject:
    return {
        "rank": note.rank,
        "peer": None if note.peer < 0 else note.peer,
        "bytes": note.bytes,
        "operands": [_tensor(each) for each in note.operands],
        "results": [_tensor(each) for each in note.results],
    }


def _tensor(noted: NotedTensor) -> JsonObject:
    return {
        "name": noted.name,
        "shape": list(noted.values.shape),
        "transposed": noted.is_transposed,
        "values": _rounded(noted.values),
    }


def _rounded(values: Tensor) -> Any:
    if values.is_floating_point():
        return values.double().mul(1e6).round().div(1e6).tolist()
    return values.tolist()


def _block(shard: Shard) -> JsonObject:
    return {
        "name": shard.name,
        "of_shape": list(shard.global_shape),
        "offset": list(shard.box.offset),
        "extent": list(shard.box.extent),
        "elements": [shard.start, shard.stop],
        "values": _rounded(shard.values),
    }


def _schedule(schedule: Schedule, simulation: Simulation) -> JsonObject:
    return {
        "name": schedule.name,
        "actions": [[str(action) for action in actions] for actions in schedule.ranks],
        "bubble_fraction": simulation.bubble_fraction,
        "peak_activations": list(simulation.peak_activations),
        "weight_versions": list(simulation.weight_versions),
    }
