"""Documents: each by its number, with the labels at the places of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.datasets.documents import DocumentFacts, Documents
from plait.datasets.files import describe
from plait.datasets.sequences import PaddedDocuments

TOKENS = np.array([5, 6, 7, 8, 9, 10], dtype=np.uint16)
ENDS = np.array([2, 3, 6], dtype=np.int64)
FACTS = DocumentFacts(max_token=10, digest=1)


def test_a_document_is_found_by_its_number() -> None:
    documents = Documents(TOKENS, ENDS, None, FACTS)
    found = [document["input_ids"].tolist() for document in documents]
    assert found == [[5, 6], [7], [8, 9, 10]]
    assert documents[-1]["labels"].tolist() == [8, 9, 10]
    assert documents[0]["input_ids"].dtype == torch.int64
    assert documents.lengths.tolist() == [2, 1, 3]
    assert documents.num_tokens == 6
    with pytest.raises(IndexError, match="document 3 of 3"):
        documents[3]


def test_only_what_is_learnt_is_a_label() -> None:
    learnt = np.array([0, 1, 1, 0, 0, 1], dtype=np.uint8)
    documents = Documents(TOKENS, ENDS, learnt, FACTS)
    assert documents[2]["input_ids"].tolist() == [8, 9, 10]
    assert documents[2]["labels"].tolist() == [-100, -100, 10]
    assert documents.span(1, 4)[1].tolist() == [6, 7, -100]


@pytest.mark.parametrize("seed", range(8))
def test_a_document_without_labels_is_no_sample(seed: int) -> None:
    """Compared with the labels of every document, one by one."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 7, size=12))
    tokens = rng.integers(1, 99, size=ends[-1]).astype(np.uint16)
    learnt = (rng.random(ends[-1]) < 0.3).astype(np.uint8)
    documents = Documents(tokens, ends, learnt, FACTS)
    padded = PaddedDocuments(documents, 3)
    wanted = [n for n in range(12) if (documents[n]["labels"][1:4] != -100).any()]
    assert padded.used.tolist() == wanted
    assert padded.num_unused == 12 - len(wanted)
    for row, number in enumerate(wanted):
        assert padded[row][0].tolist()[:1] == documents[number]["input_ids"][:1].tolist()
        assert (padded[row][1] != -100).any()
    assert f"{12 - len(wanted)} of 12 have nothing to learn in 3 tokens" in str(describe(padded))
