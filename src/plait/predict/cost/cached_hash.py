"""Hashes that are computed once. Records of the cost model are keys of all its caches."""

from __future__ import annotations

from typing import TypeVar

Record = TypeVar("Record")
NAME = "_cached_hash"


def caches_hash(record: type[Record]) -> type[Record]:
    """The frozen dataclass `record`, each of whose objects computes its hash once.

    A hash of text differs between processes, so these objects are not for pickling.
    """
    compute = record.__hash__

    def cached(self: Record) -> int:
        known: int | None = self.__dict__.get(NAME)
        if known is None:
            known = compute(self)
            object.__setattr__(self, NAME, known)
        return known

    record.__hash__ = cached  # type: ignore[assignment]
    return record
