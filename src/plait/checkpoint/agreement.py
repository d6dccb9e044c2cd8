"""The index of a checkpoint's tensors over all ranks, and how ranks come to agree on it.

The list of a rank's shards is long, and hardly ever changes between two saves of a run. A rank
whose list is that of the save before says only this. Saves behind a run's back keep the index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from plait.checkpoint.entry import entry_of
from plait.checkpoint.token import digest, sorted_text
from plait.errors import CheckpointError
from plait.mesh import Shard
from plait.values import JsonObject

Entries = list[JsonObject]


class Agreement:
    """The shards of all ranks, as the last save of a run has found them.

    Attributes:
        tensors: the index of the tensors of all ranks.
        tensors_text: its `sorted_text`.
        digests: of each rank's list of shards.
    """

    def __init__(self) -> None:
        self.tensors: JsonObject = {}
        self.tensors_text = ""
        self.digests: list[str] = []
        self._of_ranks: list[Entries] = []
        self._own: Entries | None = None
        self._given: list[Shard] = []
        self._seen: tuple[list[Shard], Entries] = ([], [])

    def look_at(self, shards: Iterable[Shard]) -> tuple[list[Shard], Entries]:
        """The shards that a file holds, and its list of them."""
        given = list(shards)
        is_alike = len(given) == len(self._given)
        if not is_alike or any(a is not b for a, b in zip(given, self._given, strict=True)):
            held = distinct(given)
            self._given = given
            self._seen = (held, [entry_of(shard) for shard in held])
        return self._seen

    def holds(self, entries: Entries) -> bool:
        """Whether this rank's list is that of the last save."""
        return entries == self._own

    def keep(self, entries: Entries) -> None:
        """Note that the first rank knows this rank's list."""
        self._own = entries

    def forget(self) -> None:
        """Have this rank send its list again."""
        self._own = None

    def learn(self, rank: int, of_ranks: Sequence[Entries | None]) -> None:
        """Take over the lists of all ranks; None stands for that of the last save.

        Errors: `CheckpointError` where they do not agree.
        """
        if all(entries is None for entries in of_ranks):
            return
        merged = [
            self._of_ranks[number] if entries is None else entries
            for number, entries in enumerate(of_ranks)
        ]
        self.tensors = agree(merged)
        self.tensors_text = sorted_text(self.tensors)
        self.digests = [digest(listed(entries)) for entries in merged]
        self._of_ranks = merged
        self._own = merged[rank]


def listed(entries: Sequence[JsonObject]) -> str:
    """The list of a file's shards, for its header."""
    return json.dumps(entries, separators=(",", ":"))


def distinct(shards: Iterable[Shard]) -> list[Shard]:
    """The shards, without empty ones (of tensors that are not empty) and repeated ones."""
    found: dict[tuple[object, ...], Shard] = {}
    for shard in shards:
        if shard.numel or not math.prod(shard.global_shape):
            found.setdefault(
                (shard.name, shard.global_shape, shard.box, shard.start, shard.stop), shard
            )
    return list(found.values())


def agree(entries: Sequence[Sequence[JsonObject]]) -> JsonObject:
    """The tensors of all ranks: name -> shape, dtype, and the indices of the files that hold
    elements of it.

    Raises:
        CheckpointError: two shards of one name disagree, or too few elements are there to cover it.
    """
    tensors: JsonObject = {}
    sizes: dict[str, dict[tuple[int, ...], int]] = {}
    for rank, held in enumerate(entries):
        for entry in held:
            name = entry["name"]
            form = {"shape": entry["shape"], "dtype": entry["dtype"]}
            known = tensors.setdefault(name, {**form, "files": []})
            if {key: known[key] for key in form} != form:
                first = f"{known['dtype']} {known['shape']} on rank {known['files'][0]}"
                raise CheckpointError(
                    f"'{name}' is {first} and {form['dtype']} {form['shape']} on rank {rank}"
                )
            if rank not in known["files"]:
                known["files"].append(rank)
            where = (*entry["offset"], *entry["extent"], entry["start"], entry["stop"])
            sizes.setdefault(name, {})[where] = entry["stop"] - entry["start"]
    for name, known in tensors.items():
        there = sum(sizes[name].values())
        numel = math.prod(known["shape"])
        if there < numel:
            raise CheckpointError(
                f"'{name}' has {numel} elements and the shards of all ranks hold {there}: one is "
                "missing"
            )
    return tensors
