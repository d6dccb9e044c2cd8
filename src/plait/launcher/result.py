"""The result of a rank, which its launcher is sent."""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

from plait.errors import PlaitError


def check_sendable(result: object) -> None:
    """Raises `PlaitError` for a result that no process can be sent, before it is lost on the way.

    A failure of the sending itself is lost: the rank then seems to have ended without a word.
    """
    try:
        _TrialPickler(_Sink()).dump(result)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise PlaitError(
            f"the result of rank {os.environ['RANK']} cannot be sent to the launcher "
            f"({str(error).partition(chr(10))[0]:.200}); return plain values from the function: "
            "numbers, texts, detached tensors, and lists and dicts of them"
        ) from error


class _Sink(io.RawIOBase):
    """A file that keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return memoryview(content).nbytes


class _TrialPickler(ForkingPickler):
    """Pickles all but the numbers of tensors, whose memory is not moved for a trial."""

    def persistent_id(self, value: object) -> str | None:
        from torch import Tensor

        is_sent = isinstance(value, Tensor) and (value.is_leaf or not value.requires_grad)
        return "tensor" if is_sent else None
