"""Tokens of texts and conversations: by bytes, by a `tokenizer.json`, or by a saved tokenizer of
`transformers`.

Truncation and padding that a file asks for are switched off: a document keeps all its tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from plait.errors import DataError
from plait.values import JsonObject

BYTES: Final = "bytes"
Message = JsonObject


class Encoded(NamedTuple):
    """The tokens of a document, and for each whether it is learnt; None where all are."""

    tokens: Sequence[int]
    learnt: Sequence[bool] | None = None


class BadRow(Exception):
    """A row that has no tokens, with the reason."""


class Tokenizer(Protocol):
    """From texts and conversations to tokens.

    Attributes:
        vocab_size: one more than the largest token.
        pad: the token that fills short sequences.
        fingerprint: a text that changes with the tokens.
    """

    vocab_size: int
    pad: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each text, with the end token where there is one."""

    def converse(self, messages: Sequence[Message]) -> Encoded:
        """The tokens of a conversation; the answers of the assistant are learnt."""


class Bytes:
    """The bytes of UTF-8; a document ends with a newline."""

    vocab_size = 256
    pad = 0
    fingerprint = BYTES

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The bytes of each text."""
        return [Encoded((text if text.endswith("\n") else f"{text}\n").encode()) for text in texts]

    def converse(self, messages: Sequence[Message]) -> Encoded:
        """Bytes have no template of conversations."""
        raise _no_template(BYTES)


class FromFile:
    """A `tokenizer.json`, read by the library `tokenizers`."""

    def __init__(self, path: Path, end_token: str | None) -> None:
        tokenizers = _import("tokenizers", path)
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as failure:  # the library raises plain Exception
            raise _unreadable(path, failure) from failure
        self._inner.no_truncation()
        self._inner.no_padding()
        self.path = path
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        self.end = None if end_token is None else _number(vocabulary, end_token, path)
        self.pad = self.end or 0
        self.fingerprint = f"{_digest([path])} {self.end}"

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each text, by all cores."""
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        found = encode(list(texts))
        return [Encoded(_ended(one.ids, self.end)) for one in found]

    def converse(self, messages: Sequence[Message]) -> Encoded:
        """The file has no template of conversations."""
        raise _no_template(str(self.path))


class FromFolder:
    """A tokenizer that `transformers` has saved, with its end token and its template of chats."""

    def __init__(self, path: Path, end_token: str | None) -> None:
        transformers = _import("transformers", path)
        try:
            self._inner = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as failure:
            raise _unreadable(path, failure) from failure
        self._inner.model_max_length = 1 << 60
        self.path = path
        vocabulary = self._inner.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values())
        self.end: int | None = self._inner.eos_token_id
        if end_token is not None:
            self.end = _number(vocabulary, end_token, path)
        pad: int | None = self._inner.pad_token_id
        self.pad = pad if pad is not None else self.end or 0
        files = sorted(file for file in path.iterdir() if file.is_file() and _is_small(file))
        self.fingerprint = f"{_digest(files)} {self.end}"

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each text."""
        found = self._inner(list(texts), padding=False, truncation=False)["input_ids"]
        return [Encoded(_ended(tokens, self.end)) for tokens in found]

    def converse(self, messages: Sequence[Message]) -> Encoded:
        """The tokens of the template's text; those of the answers are learnt.

        Raises:
            DataError: the tokenizer does not say where its tokens stand in the text.
        """
        template = self._inner.chat_template
        if not template:
            raise _no_template(str(self.path))
        if isinstance(template, str) and "generation %}" in template.replace("-%}", "%}"):
            return self._marked(messages)
        text = self._text(messages)
        answers = [
            self._answer(messages, place, text)
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        try:
            encoded = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            raise DataError(
                f"tokenizer {str(self.path)!r} does not say where its tokens stand in the text; "
                "conversations need a fast one, or a template that marks answers by "
                "{% generation %}"
            ) from None
        begins = [begin for begin, _ in encoded["offset_mapping"]]
        learnt = [any(first <= begin < last for first, last in answers) for begin in begins]
        return Encoded(encoded["input_ids"], learnt)

    def _marked(self, messages: Sequence[Message]) -> Encoded:
        """By a template that marks the answers itself."""
        try:
            found = self._inner.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as failure:
            raise BadRow(_template_failure(failure)) from failure
        return Encoded(found["input_ids"], [bool(one) for one in found["assistant_masks"]])

    def _answer(self, messages: Sequence[Message], place: int, text: str) -> tuple[int, int]:
        """The part of the text that is the answer at `place`: from its prompt to its own end."""
        before = self._text(messages[:place], prompt=True) if place else ""
        after = self._text(messages[: place + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise BadRow(
                f"the chat template of {str(self.path)!r} writes message {place + 1} otherwise "
                "when another one follows, so its answers are not to be told from the rest; mark "
                "them by {% generation %} in the template"
            )
        return len(before), len(after)

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            text: str = self._inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except Exception as failure:  # a template raises what it likes
            raise BadRow(_template_failure(failure)) from failure
        return text


def load(tokenizer: str | None, end_token: str | None = None) -> Tokenizer:
    """The tokenizer at a path; bytes without one. Raises `DataError`."""
    if tokenizer is None or tokenizer == BYTES:
        if end_token is not None:
            raise DataError(
                f"end_token = {end_token!r} needs a tokenizer; bytes have no such token"
            )
        return Bytes()
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return FromFolder(path, end_token)
    if path.is_file():
        return FromFile(path, end_token)
    raise DataError(
        f"tokenizer = {tokenizer!r}: there is neither a tokenizer.json nor a folder of a saved "
        "tokenizer"
    )


def _ended(tokens: list[int], end: int | None) -> list[int]:
    """The tokens with the end token behind them, once."""
    if end is None or not tokens or tokens[-1] == end:
        return tokens
    return [*tokens, end]


def _number(vocabulary: dict[str, int], token: str, path: Path) -> int:
    if token not in vocabulary:
        raise DataError(f"end_token = {token!r}: tokenizer {str(path)!r} has no such token")
    return vocabulary[token]


def _is_small(file: Path) -> bool:
    """Whether a file may belong to a tokenizer: weights beside it are larger."""
    return file.suffix in (".json", ".jinja", ".txt", ".model") or file.stat().st_size < 1 << 20


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(json.dumps(file.name).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _import(name: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"tokenizer {str(path)!r} is read by {name}, which is not installed here: "
            'pip install "plait[data,hf]"'
        ) from None


def _unreadable(path: Path, failure: Exception) -> DataError:
    reason = str(failure).strip().partition("\n")[0]
    return DataError(f"tokenizer {str(path)!r} cannot be read: {reason}")


def _template_failure(failure: Exception) -> str:
    return f"the chat template refuses it: {str(failure).partition(chr(10))[0]}"


def _no_template(name: str) -> DataError:
    return DataError(
        f"conversations need a tokenizer with a chat template, and {name!r} has none; give the "
        "folder of a tokenizer that transformers has saved"
    )
