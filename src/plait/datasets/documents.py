"""Tokenised documents by number: one flat array of tokens, and the place where each document ends.

The arrays may be files of the token store, mapped into memory. Opening them reads nothing, and any
document is found at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100
"""The label that counts for nothing."""
LABELLED = "labelled tokens"
"""The kind of documents whose rows say which tokens are learnt."""

Numbers: TypeAlias = npt.NDArray[np.integer]


@dataclass(frozen=True)
class DocumentFacts:
    """The numbers that reading the rows of a source has given.

    Attributes:
        max_token: the largest token.
        digest: a number of 62 bits that follows from all tokens, labels and ends.
        num_bad: rows that were left out.
        bad: the sentences of the first such rows.
        kind: `text`, `tokens`, `labelled tokens`, or `chat` for conversations.
    """

    max_token: int
    digest: int
    num_bad: int = 0
    bad: tuple[str, ...] = ()
    kind: str = "text"

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations, learnt from in their answers alone."""
        return self.kind == "chat"

    @property
    def has_labels(self) -> bool:
        """Whether some tokens may not be learnt."""
        return self.is_chat or self.kind == LABELLED


class Documents(Sequence[dict[str, Tensor]]):
    """Documents as {"input_ids": [L], "labels": [L]}, each int64.

    A label stands at the place of its own token, as `transformers` has it. It is -100 where the
    token is only read, as a question is.

    Attributes:
        tokens: the tokens of all documents, end to end [T].
        ends: the place after each document's last token [N].
        learnt: for each token whether it is a label [T]; None where all are.
        facts: the numbers of the source.
    """

    def __init__(
        self, tokens: Numbers, ends: Numbers, learnt: Numbers | None, facts: DocumentFacts
    ) -> None:
        self.tokens = tokens
        self.ends = ends
        self.learnt = learnt
        self.facts = facts

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        start = int(self.ends[index - 1]) if index else 0
        tokens, labels = self.span(start, int(self.ends[index]))
        return {"input_ids": tokens, "labels": labels}

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document [N]; no document is read for it."""
        return torch.from_numpy(np.diff(self.ends, prepend=0).astype(np.int64))

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels [stop - start] of the documents end to end, each int64."""
        tokens = torch.from_numpy(self.tokens[start:stop].astype(np.int64))
        if self.learnt is None:
            return tokens, tokens.clone()
        learnt = torch.from_numpy(self.learnt[start:stop].astype(np.bool_))
        return tokens, tokens.masked_fill(~learnt, IGNORE)
