"""The ledger: how often and how many bytes this rank sent, by axis and operation.

Bytes are counted by the formulae that predict them (`transitions.bytes_sent`). So prediction and
count can be compared exactly, however a backend moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CONTROL = "control"  # the operation under which a step's scalars are counted: loss, counts, norm


@dataclass(frozen=True)
class MessageSize:
    """The size of one operation on an axis: the bytes it is for, and those that pad the buffer."""

    bytes: int
    padding_bytes: int = 0
    control: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, padding: int = 0, control: bool = False) -> MessageSize:
        """The size of a tensor [...] whose last `padding` elements fill the buffer."""
        padding_bytes = padding * tensor.element_size()
        return cls(num_bytes(tensor) - padding_bytes, padding_bytes, control)


def num_bytes(tensor: Tensor) -> int:
    """The bytes of the elements of `tensor` [...]."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Count:
    """A number of operations, the bytes that they sent, and the bytes that they sent besides only
    to pad buffers.
    """

    num: int = 0
    bytes: int = 0
    padding_bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.num + other.num, self.bytes + other.bytes, self.padding_bytes + other.padding_bytes
        )

    def __sub__(self, other: Count) -> Count:
        return Count(
            self.num - other.num, self.bytes - other.bytes, self.padding_bytes - other.padding_bytes
        )


class Ledger:
    """Counts by (axis, operation). `copy` before and `since` after give the traffic of a stretch of
    a run.
    """

    def __init__(self, counts: dict[tuple[str, str], Count] | None = None) -> None:
        self.counts: dict[tuple[str, str], Count] = dict(counts or {})

    def add(self, axis: str, op: str, num_bytes: int, padding_bytes: int = 0) -> None:
        """Count one operation."""
        self.counts[axis, op] = self.counts.get((axis, op), Count()) + Count(
            1, num_bytes, padding_bytes
        )

    def num(self, axis: str | None = None, op: str | None = None) -> int:
        """The number of operations, of one axis or operation or of all."""
        return self._total(axis, op).num

    def bytes(self, axis: str | None = None, op: str | None = None) -> int:
        """The bytes sent, on one axis or by one operation or all."""
        return self._total(axis, op).bytes

    def by_axis(self) -> dict[str, int]:
        """Bytes sent on each axis, without padding and without the few scalars of control.

        A sub-axis counts for its axis: `dp_shard` and `dp_replicate` are `dp`. `dp*cp`, the ranks
        that share gradients with context parallelism, counts for the data axis. So does `edp`, the
        ranks that hold copies of the same experts.
        """
        totals: dict[str, int] = {}
        for (axis, op), count in sorted(self.counts.items()):
            if op != CONTROL:
                whole = axis.partition("*")[0].partition("_")[0]
                whole = "dp" if whole == "edp" else whole
                totals[whole] = totals.get(whole, 0) + count.bytes
        return totals

    def padding_bytes(self, axis: str | None = None) -> int:
        """The bytes sent only because buffers are padded to a multiple of the axis."""
        return self._total(axis, None).padding_bytes

    def copy(self) -> Ledger:
        """The counts as they are now."""
        return Ledger(self.counts)

    def since(self, earlier: Ledger) -> Ledger:
        """The counts made after `earlier`, a copy of this ledger, was taken."""
        gone = {key: count - earlier.counts.get(key, Count()) for key, count in self.counts.items()}
        return Ledger({key: count for key, count in gone.items() if count.num})

    def restore(self, earlier: Ledger) -> None:
        """Count no more than `earlier`, a copy of this ledger: what came since was no traffic."""
        self.counts = dict(earlier.counts)

    def clear(self) -> None:
        """Forget everything."""
        self.counts.clear()

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """`{axis: {op: {"num": n, "bytes": b, "padding_bytes": p}}}`, for JSON."""
        result: dict[str, dict[str, dict[str, int]]] = {}
        for (axis, op), count in sorted(self.counts.items()):
            result.setdefault(axis, {})[op] = {
                "num": count.num,
                "bytes": count.bytes,
                "padding_bytes": count.padding_bytes,
            }
        return result

    def _total(self, axis: str | None, op: str | None) -> Count:
        chosen = [c for (a, o), c in self.counts.items() if axis in {None, a} and op in {None, o}]
        return sum(chosen, Count())
