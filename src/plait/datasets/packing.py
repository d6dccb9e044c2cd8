"""Packing: several documents of tokens in one sample, each alone with itself.

A document of L tokens has L - 1 positions: every token but the last guesses the next one. Documents
of more than S positions are cut into pieces of S, which then are documents of their own. No token
is guessed twice and none is left out. Pieces go into samples of S positions by best fit decreasing,
`WINDOW` pieces at a time. The longest comes first. Each goes into the fullest sample of its window
that still takes it. So samples stay near the order of the documents, and the plan costs little for
any number of them. The plan is a function of the lengths alone, so that a run resumes exactly.

What is left of a sample is filled with zeros: one more document, none of whose labels count.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.datasets.documents import IGNORE
from plait.datasets.keys import SectionKeys, key
from plait.datasets.sample_set import SampleSet
from plait.errors import DataError

FAMILIES = ("gpt", "llama", "hf")  # that take documents and positions
WINDOW = 4096  # pieces that are fitted together


@dataclass(frozen=True)
class Piece:
    """The positions from `start` on of a document, `length` of them."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class PackingPlan:
    """Which pieces each sample has. Piece p of all is in sample s if first[s] <= p < first[s + 1].

    `pieces` [P, 3]: the document of each, its first position there, and its length. `first` has
    [samples + 1] numbers.
    """

    seq_len: int
    pieces: Tensor
    first: Tensor

    @property
    def num_samples(self) -> int:
        """Samples."""
        return len(self.first) - 1

    @property
    def fill(self) -> float:
        """The share of all positions that documents have."""
        return int(self.pieces[:, 2].sum()) / (self.num_samples * self.seq_len)

    def of(self, sample: int) -> list[Piece]:
        """The pieces of a sample, in their order."""
        start, stop = self.first[sample : sample + 2].tolist()
        return [Piece(*row) for row in self.pieces[start:stop].tolist()]


class Packing(Dataset[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]):
    """((input_ids [S], documents [S], positions [S]), labels [S]) of packed documents.

    `documents[i]` is a mapping with `input_ids` [L], and `labels` [L] where not every token counts.
    A label stands at the place of its token, and is -100 for one that is not to be guessed.
    `documents.lengths` [number], where it is there, saves reading all of them for the plan.

    Attributes:
        content: a number that follows from all tokens and labels, where the documents know it.
        num_bad: rows that were left out, where the documents know it.
    """

    keyed_order = True

    def __init__(self, documents: SampleSet, seq_len: int, *, window: int = WINDOW) -> None:
        self.documents = documents
        self.seq_len = seq_len
        self.plan = plan_of(lengths_of(documents), seq_len, window)
        facts = getattr(documents, "facts", None)
        self.content: int | None = getattr(facts, "digest", None)
        self.num_bad: int | None = getattr(facts, "num_bad", None)

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        tokens = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORE)
        pieces = self.plan.of(index)
        end = 0
        for piece in pieces:
            document = self.documents[piece.document]
            ids = torch.as_tensor(document["input_ids"])
            wanted = torch.as_tensor(document.get("labels", ids))
            place = slice(end, end + piece.length)
            stop = piece.start + piece.length
            tokens[place] = ids[piece.start : stop]
            labels[place] = wanted[piece.start + 1 : stop + 1]
            end += piece.length
        numbers, positions = _places([piece.length for piece in pieces], self.seq_len)
        return (tokens, numbers, positions), labels

    def batch(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Samples [B] -> ((input_ids, documents, positions) [B, S] each, labels [B, S])."""
        samples = [self[index] for index in indices.tolist()]
        if not samples:
            none = torch.zeros((0, self.seq_len), dtype=torch.int64)
            return (none, none, none), none
        columns = zip(*(inputs for inputs, _ in samples), strict=True)
        inputs = tuple(torch.stack(parts) for parts in columns)
        return inputs, torch.stack([one[1] for one in samples])


def _places(lengths: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """The number of each position's document, and its place there; the rest is one more.

    >>> [places.tolist() for places in _places([2, 1], 5)]
    [[0, 0, 1, 2, 2], [0, 1, 0, 0, 1]]
    """
    filled = [*lengths, seq_len - sum(lengths)]
    sizes = torch.tensor(filled)
    numbers = torch.repeat_interleave(torch.arange(len(filled)), sizes)
    begins = sizes.cumsum(0) - sizes
    return numbers, torch.arange(seq_len) - begins[numbers]


def lengths_of(documents: SampleSet) -> Tensor:
    """The number of tokens of each document, [documents]."""
    known = getattr(documents, "lengths", None)
    if known is not None:
        return torch.as_tensor(known)
    return torch.tensor([len(documents[index]["input_ids"]) for index in range(len(documents))])


def plan_of(lengths: Tensor, seq_len: int, window: int = WINDOW) -> PackingPlan:
    """The samples of documents with so many tokens each: `lengths` [documents].

    Raises `DataError` where no document has two tokens, which one to guess from the other.
    """
    samples: list[list[Piece]] = []
    pieces = _pieces(lengths.tolist(), seq_len)
    while some := list(islice(pieces, window)):
        samples += fitted(some, seq_len)
    if not samples:
        raise DataError(
            f"packing found no document of two tokens or more among {len(lengths)}: there is "
            "nothing to guess"
        )
    rows = [(piece.document, piece.start, piece.length) for sample in samples for piece in sample]
    sizes = torch.tensor([len(sample) for sample in samples])
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return PackingPlan(seq_len, torch.tensor(rows), first)


def _pieces(lengths: Sequence[int], seq_len: int) -> Iterator[Piece]:
    """The pieces of all documents, in their order."""
    for number, length in enumerate(lengths):
        edges = [*range(0, length - 1, seq_len), length - 1]
        for start, stop in pairwise(edges):
            yield Piece(number, start, stop - start)


def fitted(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Best fit decreasing: samples whose pieces have at most `seq_len` positions together.

    >>> sizes = [3, 5, 2, 4]
    >>> samples = fitted([Piece(n, 0, size) for n, size in enumerate(sizes)], 7)
    >>> [[piece.length for piece in sample] for sample in samples]
    [[5, 2], [4, 3]]
    """
    samples: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # what each sample that is not full has left, and its number
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        place = bisect_left(rooms, (piece.length, 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
            samples[number].append(piece)
        else:
            room = seq_len
            number = len(samples)
            samples.append([piece])
        if room > piece.length:
            insort(rooms, (room - piece.length, number))
    return samples


def check(data: SectionKeys, model: SectionKeys, sources: Sequence[str]) -> None:
    """Refuse data without documents, and a model whose documents would see each other.

    `data` and `model` are those sections; `sources` are the names of data with documents. Raises
    `DataError`.
    """
    for name in ("packed", "samples"):
        if key(data, name) not in (None, False):
            raise DataError(
                f"packing makes samples of documents itself; leave {name} = {key(data, name)!r} out"
            )
    if key(data, "python") is None and key(data, "name") not in sources:
        raise DataError(
            f"packing needs documents, and data {key(data, 'name')!r} has none; use "
            f"{', '.join(sources)} or python"
        )
    family = key(model, "name")
    task = key(model, "task", "causal")
    if family is not None and (family not in FAMILIES or task != "causal"):
        what = f"task {task!r}" if family in FAMILIES else f"model {family!r}"
        raise DataError(
            f"packing is for models that guess the next token, not for {what}; leave packing out"
        )
    competing = {"capacity_factor": key(model, "capacity_factor")}
    if key(model, "topk_method") == "expert_choice":
        competing["topk_method"] = "expert_choice"
    for name, value in competing.items():
        if value is not None:
            raise DataError(
                f"{name} = {value!r} lets the tokens of a sequence compete for experts, so packed "
                f"documents would see each other; leave packing or {name} out"
            )
