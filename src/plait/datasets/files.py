"""Data `files` and `hf`: from a `[data]` section to documents, and to samples of equal length."""

from __future__ import annotations

import sys
from pathlib import Path

from plait.datasets import tokenizer as tokenizers
from plait.datasets.documents import Documents
from plait.datasets.keys import SectionKeys, key, known_vocabulary
from plait.datasets.library_set import library_set
from plait.datasets.rows import FileRows, RowSource, matching
from plait.datasets.sequences import PaddedDocuments, Sequences, TokenStream
from plait.datasets.token_store import Making
from plait.datasets.token_store import documents as documents_of
from plait.datasets.tokenizer import Tokenizer
from plait.errors import DataError

NAMES = ("files", "hf")


def load_documents(data: SectionKeys, model: SectionKeys = None) -> tuple[Documents, Tokenizer]:
    """The tokenised documents of a `[data]` section, and the tokenizer that it names.

    They fit the vocabulary of a `[model]` section that says one. The tokens are made at the first
    call and kept. Raises `DataError`.
    """
    vocab_size = known_vocabulary(model)
    name = key(data, "tokenizer")
    tokenizer = tokenizers.load(name, key(data, "end_token"))
    rows = _rows(data)
    if name is not None and vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {name!r} has {tokenizer.vocab_size} tokens, and the model's vocabulary "
            f"{vocab_size}; set vocab_size = {tokenizer.vocab_size} or more"
        )
    making = Making(rows, tokenizer, key(data, "skip_bad", 0))
    cache = key(data, "cache")
    documents = documents_of(making, None if cache is None else Path(cache))
    largest = documents.facts.max_token
    is_bytes = name is None and documents.facts.kind == "text"
    if is_bytes and key(model, "name") == "hf" and vocab_size not in (None, tokenizer.vocab_size):
        raise DataError(
            f"the model's vocabulary has {vocab_size} tokens, and {rows.name} is read as bytes; "
            "name the tokenizer by data.tokenizer, or say data.tokenizer = 'bytes' to train on "
            "bytes all the same"
        )
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"{rows.name} has the token {largest}, and the model's vocabulary {vocab_size}; set "
            f"vocab_size = {largest + 1} or more"
        )
    return documents, tokenizer


def load_sequences(data: SectionKeys, model: SectionKeys, seq_len: int) -> Sequences:
    """The samples of a `[data]` section: windows of the stream, or padded documents.

    Raises:
        DataError: no sample has a token to learn, or the stream is too short for one.
    """
    documents, tokenizer = load_documents(data, model)
    usual = "documents" if documents.facts.is_chat else "stream"
    if key(data, "samples", usual) == "stream":
        stream = TokenStream(documents, seq_len)
        if len(stream) == 0:
            raise DataError(
                f"{_rows(data).name}: {documents.num_tokens} tokens are too few for one sample of "
                f"seq_len + 1 = {seq_len + 1}"
            )
        return stream
    padded = PaddedDocuments(documents, seq_len, tokenizer.pad)
    if len(padded) == 0:
        raise DataError(
            f"{_rows(data).name}: no document has a token to learn among its first seq_len + 1 = "
            f"{seq_len + 1}"
        )
    return padded


def describe(sequences: Sequences) -> str | None:
    """A sentence on the documents that are cut off or unused; None where none is."""
    if not isinstance(sequences, PaddedDocuments):
        return None
    size = sequences.seq_len
    total = len(sequences.documents)
    sentences = []
    if sequences.num_truncated:
        sentences.append(
            f"{sequences.num_truncated:,} of {total:,} documents are longer than seq_len = {size} "
            "and are cut off there"
        )
    if sequences.num_unused:
        sentences.append(
            f"{sequences.num_unused:,} of {total:,} have nothing to learn in {size} tokens and are "
            "left out"
        )
    return "; ".join(sentences) or None


def say_cut_off(dataset: object) -> None:
    """Print that sentence on stderr, for each set of a mixture too."""
    for one in getattr(dataset, "sets", (dataset,)):
        sentence = describe(one) if isinstance(one, Sequences) else None
        if sentence is not None:
            print(f"data: {sentence}", file=sys.stderr, flush=True)


def _rows(data: SectionKeys) -> RowSource:
    if key(data, "name") == "hf":
        return library_set(data)
    files = matching(key(data, "files", ()))
    if not files:
        raise DataError('data "files" needs files = ["a/*.jsonl", ...]')
    return FileRows(files, key(data, "column"), key(data, "document", "line"))
