"""Documents: each by its number, with the labels at the places of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.datasets.documents import DocumentFacts, Documents

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
