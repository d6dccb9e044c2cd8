"""Steps and blocks in words and numbers, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from plait.explain.notebook import NotedOperation, NotedTensor
from plait.explain.steps import Step
from plait.mesh import Shard

MOST_NUMBERS = 16
MOST_RANKS = 4

SENTENCES = {
    "all_reduce": "all-reduce in {group}: add up {what}; each gets the sum",
    "reduce_scatter": "reduce-scatter in {group}: add up {what}; each gets its part of the sum",
    "all_gather": "all-gather in {group}: each gets {whole}",
    "all_to_all": "all-to-all in {group}: each sends a part of {what} to each other",
    "broadcast": "broadcast in {group}: {root} sends {what} to the others",
    "reduce": "reduce in {group}: add up {what} on {root}",
    "shift": "shift in {group}: each sends {what} round the ring, and receives",
    "send": "send",
    "push": "push: each worker sends its gradients to the servers",
    "pull": "pull: each server sends its weights to the workers",
    "control": "all-reduce of a few scalars: loss, samples, squared norm",
    "multiply": "multiply",
    "attention": "attention",
}
COUNTS = "all-reduce of the number of samples, which divides the loss"
ORDINALS = ("first", "second", "third")


def number(value: float) -> str:
    """A number in at most three digits, a whole one without a point."""
    if abs(value - round(value)) < 5e-7 and abs(value) < 1e6:
        return str(round(value))
    return f"{value:.3g}"


def matrix(values: Tensor) -> str:
    """Rows of values [..., columns] between semicolons: `[1 0; 0 1]`, cut off where there
    are many.
    """
    rows = values.reshape(-1, values.shape[-1]) if values.dim() > 1 else values.reshape(1, -1)
    flat = [[number(value) for value in row] for row in rows.tolist()]
    if values.numel() <= MOST_NUMBERS:
        return f"[{'; '.join(' '.join(row) for row in flat)}]"
    shown = []
    left = MOST_NUMBERS - 4
    for row in flat:
        if left <= 0:
            break
        shown.append(" ".join(row[:left]))
        left -= len(row)
    return f"[{'; '.join(shown)} ..]"


def shape(sizes: Sequence[int]) -> str:
    """`[2x4]`."""
    return f"[{'x'.join(map(str, sizes))}]"


def named(noted: NotedTensor) -> str:
    """The name and the shape of a tensor."""
    name = noted.name or "a block"
    if noted.is_transposed:
        name = f"{name}^T" if "(" not in name and " " not in name else f"({name})^T"
    return f"{name} {shape(noted.values.shape)}"


def sentence(step: Step) -> str:
    """A sentence on what happens."""
    words = SENTENCES.get(step.operation, step.operation)
    if step.operation == "control" and step.phase == "before":
        words = COUNTS
    what = step.name or "a block"
    if what.startswith("block of "):
        what = f"a {what}"
    if step.operation in ("multiply", "attention"):
        operands = step.first.operands
        words += ": " + " times ".join(map(named, operands))
        if step.first.results and step.first.results[0].name:
            words += f" = {named(step.first.results[0])}"
        return words
    if step.operation == "send":
        return "send round the ring" if _is_ring(step) else words
    got = step.first.results[:1]
    whole = got[0].name if got and got[0].name else f"{what} of all"
    return words.format(what=what, whole=whole, group=groups(step), root=_root(step))


def _is_ring(step: Step) -> bool:
    """Whether every rank sends to the next."""
    group = step.first.ranks
    size = len(group)
    nexts = {(group.index(note.peer) - group.index(note.rank)) % size for note in step.notes}
    return len(step.notes) == size > 2 and nexts == {1}


def _root(step: Step) -> str:
    note = step.first
    if note.peer < 0 or not note.ranks:
        return ""
    if len(step.groups) == 1:
        return f"rank {note.peer}"
    index = note.ranks.index(note.peer)
    return f"the {ORDINALS[index]} of each" if index < len(ORDINALS) else f"number {index}"


def groups(step: Step) -> str:
    """The ranks that act together: `ranks 0-3`, or `ranks 0,1 and 2,3`."""
    lines = [ranks(group).partition(" ")[2] for group in step.groups]
    if len(lines) > MOST_RANKS:
        return f"ranks {lines[0]} and {len(lines) - 1} such lines"
    return f"ranks {' and '.join(lines)}"


def ranks(group: Sequence[int]) -> str:
    """`ranks 0-3`, `ranks 0,2`, `rank 1`."""
    if len(group) == 1:
        return f"rank {group[0]}"
    if len(group) > 2 and list(group) == list(range(group[0], group[-1] + 1)):
        return f"ranks {group[0]}-{group[-1]}"
    return f"ranks {','.join(map(str, group))}"


def sent(step: Step) -> str:
    """The bytes that ranks send in a step."""
    each = {note.bytes for note in step.notes}
    if not step.axis:
        return ""
    if len(step.notes) == 1:
        return f"{step.bytes} bytes from rank {step.first.rank}"
    if len(each) == 1:
        return f"{step.bytes} bytes: {next(iter(each))} from each of {len(step.notes)} ranks"
    return f"{step.bytes} bytes"


def details(step: Step) -> list[str]:
    """Lines with the numbers: of the first rank for a product, of the first lines of ranks else."""
    if step.operation in ("control", "push", "pull"):
        return []
    if not step.axis:
        return [_product(step.first)]
    write = GROUP_LINES.get(step.transport)
    if write is None:
        lines = [_line(note) for note in step.notes]
    else:
        lines = [write(step.notes_of(group)) for group in step.groups]
    if len(lines) > MOST_RANKS:
        rest = len(lines) - MOST_RANKS
        return [*lines[:MOST_RANKS], f"(and {rest} more; --json has all)"]
    return lines


def _product(note: NotedOperation) -> str:
    operands = " times ".join(matrix(each.values) for each in note.operands)
    return f"rank {note.rank}: {operands} = {matrix(note.results[0].values)}"


def _line(note: NotedOperation) -> str:
    head = f"rank {note.rank}"
    if note.operation == "send":
        each = note.operands[0]
        return f"{head} -> rank {note.peer}: {each.name} {matrix(each.values)}, {note.bytes} bytes"
    parts = [f"{head}:"]
    if note.operands:
        parts.append(f"gives {matrix(note.operands[0].values)}")
    if note.results:
        parts.append(f"gets {matrix(note.results[0].values)}")
    return " ".join(parts)


def _from_root(notes: Sequence[NotedOperation]) -> str:
    root = next(note for note in notes if note.rank == note.peer)
    others = ranks([rank for rank in root.ranks if rank != root.rank])
    return f"rank {root.rank} -> {others}: {matrix(root.operands[0].values)}"


def _added(notes: Sequence[NotedOperation]) -> str:
    terms = [matrix(note.operands[0].values) for note in notes]
    if len(terms) > MOST_RANKS:
        terms = [*terms[:2], "..", terms[-1]]
    return " + ".join(terms)


def _to_root(notes: Sequence[NotedOperation]) -> str:
    root = next(note for note in notes if note.rank == note.peer)
    return f"{_added(notes)} = {matrix(root.results[0].values)} on rank {root.rank}"


def _to_all(notes: Sequence[NotedOperation]) -> str:
    group = ranks(notes[0].ranks)
    return f"{group}: {_added(notes)} = {matrix(notes[0].results[0].values)}"


def _to_parts(notes: Sequence[NotedOperation]) -> str:
    kept = [f"rank {note.rank} {matrix(note.results[0].values)}" for note in notes[:MOST_RANKS]]
    return f"{_added(notes)}, of which {', '.join(kept)}{' ..' * (len(notes) > MOST_RANKS)}"


def _side_by_side(notes: Sequence[NotedOperation]) -> str:
    given = [f"rank {note.rank} {matrix(note.operands[0].values)}" for note in notes[:MOST_RANKS]]
    more = " .." * (len(notes) > MOST_RANKS)
    return f"{', '.join(given)}{more}: each has {matrix(notes[0].results[0].values)}"


GROUP_LINES: dict[str, Callable[[Sequence[NotedOperation]], str]] = {
    "broadcast": _from_root,
    "reduce": _to_root,
    "all_reduce": _to_all,
    "reduce_scatter": _to_parts,
    "all_gather": _side_by_side,
}
"""From the notes of a line of ranks to a line of text, by operation."""


def _range(words: str, first: int, length: int) -> str:
    if length == 1:
        return f"{words.removesuffix('s')} {first}".strip()
    return f"{words} {first}-{first + length - 1}".strip()


def block(shard: Shard) -> str:
    """The part of a weight that lies on a rank: `W1 rows 0-1, columns 2-3`."""
    whole = tuple(shard.global_shape)
    if shard.numel == shard.box.numel and tuple(shard.box.extent) == whole:
        where = "whole"
    else:
        words = ("rows", "columns") if len(whole) == 2 else ("",) * len(whole)
        cuts = [
            _range(word, first, length)
            for word, first, length, size in zip(
                words, shard.box.offset, shard.box.extent, whole, strict=True
            )
            if length != size
        ]
        if shard.numel != shard.box.numel:
            cuts.append(f"numbers {shard.start}-{shard.stop - 1} of {shard.box.numel}")
        where = ", ".join(cuts)
    values = shard.values
    if shard.numel == shard.box.numel:
        values = values.view(shard.box.extent)
    return f"{shard.name} {where} {matrix(values)}"
