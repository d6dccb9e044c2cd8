"""The steps of a recording: what ranks did alike is one step, with the values of each.

Ranks run the same program on other data. So the n-th operation of a kind in an action is one step
on all ranks that have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from plait.explain.notebook import NotedOperation, NotedTensor
from plait.explain.recording import RankRecording

PHASES = {"F": "forward", "SEND_F": "forward", "RECV_F": "forward", "UNSHARD": "forward"}
PHASES |= dict.fromkeys(("B", "I", "W", "SEND_B", "RECV_B", "REDUCE"), "backward")
PHASES |= {"U": "update", "build": "before"}
ROOTED = ("broadcast", "reduce")


@dataclass
class Step:
    """One operation, on all ranks that did it.

    Attributes:
        step: of training, from 1; 0 while a pipeline drains.
        phase: `forward`, `backward` or `update`.
        action: of the schedule, as `0F0`.
        operation: `multiply`, `attention`, or that of the ledger.
        transport: the operation of the axis, where the ledger calls it `control`.
        notes: of the ranks.
    """

    step: int
    phase: str
    action: str
    operation: str
    axis: str
    transport: str
    notes: list[NotedOperation] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """The ranks that did it."""
        return [note.rank for note in self.notes]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The lines of ranks that did it together."""
        return sorted({note.ranks for note in self.notes if note.ranks})

    def notes_of(self, group: tuple[int, ...]) -> list[NotedOperation]:
        """The notes of one of `groups`."""
        return [note for note in self.notes if note.ranks == group]

    @property
    def bytes(self) -> int:
        """Sent by all ranks together."""
        return sum(note.bytes for note in self.notes)

    @property
    def first(self) -> NotedOperation:
        """The note of the first rank."""
        return self.notes[0]

    @property
    def name(self) -> str:
        """The name of what is sent, of the first rank that knows it."""
        names = [each.name for note in self.notes for each in note.operands[:1] if each.name]
        return names[0] if names else ""

    @property
    def is_form(self) -> bool:
        """Whether it only says which tensors will come."""
        operands = self.first.operands
        if self.operation != "send":
            return False
        return bool(operands) and not operands[0].values.is_floating_point()

    @property
    def shape(self) -> list[list[int]]:
        """The shapes of what is multiplied or sent, of the first rank that has it."""
        for note in self.notes:
            if note.operands:
                return [list(each.values.shape) for each in note.operands]
        return [list(each.values.shape) for each in self.first.results]


def steps_of(
    recordings: Sequence[RankRecording], start: Mapping[str, float] | None = None
) -> list[Step]:
    """The steps of all ranks, in the order of the run.

    Where ranks do different actions, `start` has the moment of each.
    """
    by_key: dict[tuple[object, ...], Step] = {}
    place: dict[tuple[object, ...], tuple[float, ...]] = {}
    for recording in recordings:
        seen: Counter[tuple[object, ...]] = Counter()
        actions: dict[tuple[int, str], int] = {}
        for index, note in enumerate(recording.notes):
            begun = actions.setdefault((note.step, note.action), len(actions))
            alike = (note.step, note.action, note.operation, note.axis, _relation(note))
            key = (*alike, seen[alike])
            seen[alike] += 1
            if key not in by_key:
                phase = PHASES.get(_kind(note.action), "forward")
                by_key[key] = Step(
                    note.step, phase, note.action, note.operation, note.axis, note.transport
                )
            by_key[key].notes.append(note)
            at: tuple[float, ...]
            moment = float(begun) if start is None else start.get(note.action, -1.0)
            at = (moment, float(index))
            if start is not None:  # what is sent at a moment comes before what begins then
                is_later = "SEND" not in note.action
                at = (moment, float(is_later), float(recording.rank), float(index))
            place[key] = min(place.get(key, at), at)
    _name_results(recordings, by_key.values())
    return [by_key[key] for key in sorted(by_key, key=lambda key: place[key])]


def _kind(action: str) -> str:
    """The kind of an action: `SEND_F` for `2SEND_F0`."""
    return action.strip("0123456789")


def _relation(note: NotedOperation) -> int | None:
    """Where the other rank stands: the root's coordinate, or the distance of a shift."""
    if note.peer < 0 or not note.ranks or note.operation == "send":
        return None
    peer = note.ranks.index(note.peer)
    if note.operation in ROOTED:
        return peer
    return (peer - note.ranks.index(note.rank)) % len(note.ranks)


def _name_results(recordings: Sequence[RankRecording], steps: Collection[Step]) -> None:
    """Name what came of named operands, and what is made of that."""
    sent = {id(note): step.name for step in steps for note in step.notes}
    for step in steps:
        if step.operation == "broadcast":
            _name_broadcast(step)
    for recording in recordings:
        known: list[NotedTensor] = []
        for note in recording.notes:
            for operand in note.operands:
                if not operand.name:
                    operand.name = _known_name(operand, known)
            for result in note.results:
                if not result.name:
                    result.name = _result_name(note, sent.get(id(note), ""))
                if result.name:
                    known.append(result)


def _known_name(operand: NotedTensor, known: list[NotedTensor]) -> str:
    for other in reversed(known):
        if operand.place.meets(other.place):
            return other.name
    return ""


def _name_broadcast(step: Step) -> None:
    roots = {note.rank: note.operands[0].name for note in step.notes if note.operands}
    for note in step.notes:
        name = roots.get(note.peer)
        if name and note.results and note.rank != note.peer:
            note.results[0].name = f"{name} of rank {note.peer}"


def _result_name(note: NotedOperation, sent: str) -> str:
    names = [operand.name for operand in note.operands]
    if note.operation == "multiply":
        return _product_name(*names)
    name = names[0] if names and names[0] else ""
    if not name:
        return ""
    if note.transport == "all_gather":
        return f"all of {name}"
    if note.transport in ("all_reduce", "reduce", "reduce_scatter"):
        return f"sum of {name}"
    return ""


def _product_name(left: str, right: str) -> str:
    """`dW1` for dY(W1)^T X(W1), `dX(W1)` for dY(W1) W1, where the factors have names."""
    _, opened, rest = left.partition("dY(")
    layer, closed, _ = rest.partition(")")
    if not (opened and closed and right):
        return ""
    plain = right.removeprefix("all of ")
    if plain == layer or plain.startswith((f"{layer} ", f"{layer}[")):
        return f"dX({layer})"
    return f"d{layer}"
