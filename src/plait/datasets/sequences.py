"""Samples of equal length from documents: cut from one stream, or one document each.

The labels of a sample are its tokens one place ahead. -100 stands where nothing is learnt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.datasets.documents import IGNORE, Documents


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Pairs (input_ids [S], labels [S]) of documents, in the order of a keyed permutation.

    Attributes:
        content: a number that follows from all tokens and labels.
        num_bad: rows that were left out.
    """

    keyed_order = True

    def __init__(self, documents: Documents, seq_len: int) -> None:
        self.documents = documents
        self.seq_len = seq_len
        self.content = documents.facts.digest
        self.num_bad = documents.facts.num_bad

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, labels = self.batch(torch.tensor([index]))
        return inputs[0], labels[0]

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S])."""
        raise NotImplementedError

    def _gathered(self, places: npt.NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """The tokens at places, and the labels that they are."""
        documents = self.documents
        tokens = torch.from_numpy(documents.tokens[places].astype(np.int64))
        if documents.learnt is None:
            return tokens, tokens
        learnt = torch.from_numpy(documents.learnt[places].astype(np.bool_))
        return tokens, tokens.masked_fill(~learnt, IGNORE)


class TokenStream(Sequences):
    """All documents end to end, cut into windows of S + 1 tokens.

    The label of one window's end begins the next. An incomplete last window is left out.
    """

    def __len__(self) -> int:
        return max(0, (self.documents.num_tokens - 1) // self.seq_len)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S])."""
        places = indices.numpy()[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        tokens, labels = self._gathered(places)
        return tokens[:, :-1], labels[:, 1:]


class PaddedDocuments(Sequences):
    """One document a sample: its first S + 1 tokens, filled up with `pad`, which is not learnt.

    A document that has no label in them is none.

    Attributes:
        used: the numbers of the documents that are samples.
    """

    def __init__(self, documents: Documents, seq_len: int, pad: int = 0) -> None:
        super().__init__(documents, seq_len)
        self.pad = pad
        self.used = np.flatnonzero(_has_labels(documents, seq_len))

    def __len__(self) -> int:
        return len(self.used)

    @property
    def num_truncated(self) -> int:
        """Documents of more than S + 1 tokens."""
        return int((self.documents.lengths > self.seq_len + 1).sum())

    @property
    def num_unused(self) -> int:
        """Documents without a token that is learnt among their first S + 1."""
        return len(self.documents) - len(self.used)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S])."""
        numbers = self.used[indices.numpy()]
        ends = self.documents.ends
        stops = ends[numbers]
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        places = starts[:, None] + np.arange(self.seq_len + 1)
        beyond = torch.from_numpy(places >= stops[:, None])
        tokens, labels = self._gathered(np.minimum(places, stops[:, None] - 1))
        tokens = tokens.masked_fill(beyond, self.pad)
        labels = labels.masked_fill(beyond, IGNORE)
        return tokens[:, :-1], labels[:, 1:]


def _has_labels(documents: Documents, seq_len: int) -> npt.NDArray[np.bool_]:
    """Whether a document has a label among its tokens 1 .. S [N]."""
    stops = np.asarray(documents.ends)
    firsts = np.concatenate([[0], stops[:-1]]) + 1
    stops = np.minimum(stops, firsts + seq_len)
    has_room = stops > firsts
    learnt = documents.learnt
    if learnt is None or not has_room.any():
        return has_room
    last = len(learnt) - 1
    edges = np.stack([np.minimum(firsts, last), np.minimum(stops, last)], axis=1)
    sums = np.add.reduceat(learnt, edges.reshape(-1), dtype=np.int64)[::2]
    sums = sums + np.where(stops > last, learnt[last], 0)
    return has_room & (sums > 0)
