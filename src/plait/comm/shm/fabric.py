"""The interface of ranks that can read each other's memory: headers, signals, and views of exposed
tensors.

A signal is a counter for each (kind, from, to). Posting adds one; taking waits for one and removes
it. Both are full memory barriers, so a write before a post is seen after the take.
`collectives.Direct` runs on this; processes of one host implement it (`processes`), and so do
threads of one process (`threads`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import RunError
from plait.paths import Paths

RING = 64  # operations of one axis that may be under way at once

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class Signal(IntEnum):
    """The kinds of signals, in the order in which one operation uses them."""

    ARRIVE = 0  # my header is published and my data may be read
    MIDDLE = 1  # my part of the first phase is done
    EXIT = 2  # I read nothing of this operation any more
    MESSAGE = 3  # a message lies in the box
    TAKEN = 4  # a message was copied out of the box
    LEFT = 5  # I read nothing any more of what you show


class Header(NamedTuple):
    """The announcement of one rank's side of operation `number`. `offsets` are elements; in an
    all_to_all they say where each part begins.
    """

    number: int
    op: str
    numel: int
    dtype: torch.dtype
    offsets: tuple[int, ...] = ()

    def match(self, other: Header, peer: int, same_numel: bool) -> None:
        """Raise unless the peer runs the same operation.

        Raises:
            RunError: the ranks called different things; names both.
        """
        mine = (self.number, self.op, self.dtype)
        theirs = (other.number, other.op, other.dtype)
        if mine != theirs or (same_numel and self.numel != other.numel):
            raise RunError(
                f"the ranks of one axis called different operations: this rank {self._text()}, "
                f"coordinate {peer} "
                f"{other._text()}; all ranks of an axis call the same operations in the same order "
                "(a forward that calls other layers on each rank does not, under zero3)"
            )

    def _text(self) -> str:
        return (
            f"{self.op} of {self.numel} {str(self.dtype).removeprefix('torch.')} (its operation "
            f"{self.number})"
        )


class Staged(ABC):
    """A piece of readable memory, `tensor` (numel,), lent for one operation."""

    tensor: Tensor

    @abstractmethod
    def release(self) -> None:
        """No peer reads it any more."""


@dataclass
class InboundMessage(ABC):
    """Something sent point-to-point: `data` (numel,) lies in the sender's memory until
    `release`.
    """

    tag: int
    data: Tensor

    @abstractmethod
    def release(self) -> None:
        """Free the memory of this message, which has been copied."""


class Fabric(ABC):
    """One rank's side. `rank` and `size` are those of the line."""

    rank: int
    size: int

    def follow(self, paths: Paths) -> None:  # noqa: B027
        """Take the ways that `paths` says; nothing by default."""

    @abstractmethod
    def post(self, signal: Signal, *to: int) -> None:
        """Add one for each; never blocks."""

    @abstractmethod
    def try_take(self, signal: Signal, source: int) -> bool:
        """Remove one if there is one; never blocks."""

    @abstractmethod
    def take(self, signal: Signal, source: int) -> None:
        """Wait for one and remove it.

        Raises:
            RankFailed: the peer is dead, has left, or was silent too long.
        """

    @abstractmethod
    def publish(self, header: Header, data: Tensor | None) -> None:
        """Publish this rank's side of an operation; `data` (numel,) is flat and `readable`, or
        staged.
        """

    @abstractmethod
    def read(self, peer: int, number: int) -> Header:
        """The header of a peer that has arrived at operation `number`."""

    @abstractmethod
    def data(self, peer: int, header: Header) -> Tensor:
        """The flat data (numel,) of a peer's header, as memory of its own. It may be read until
        EXIT is posted to it.
        """

    @abstractmethod
    def readable(self, tensor: Tensor) -> bool:
        """Whether peers can read this tensor [...] where it lies."""

    @abstractmethod
    def stage(self, numel: int, dtype: torch.dtype) -> Staged:
        """Borrow readable memory (numel,)."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Readable memory (numel,) to keep."""

    def is_full(self, to: int) -> bool:
        """Whether a send to this peer would block now; never, by default."""
        return False

    @abstractmethod
    def send_message(self, to: int, tag: int, flat: Tensor) -> None:
        """Put a copy of `flat` (numel,) into the box of (self, to). The call blocks only when the
        box is full of messages not yet taken.
        """

    @abstractmethod
    def next_message(self, source: int, block: bool) -> InboundMessage | None:
        """The next message of (source, self), in order of sending; None if there is none and
        `block` is False.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave: peers that still wait for this rank fail at once."""
