"""Rates at which this machine keeps a run's state, and the times of a start and of a recovery."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

from plait.errors import SaveFailed
from plait.launcher import launch
from plait.predict.probe.recovering import recovery_seconds
from plait.values import JsonObject

STATE_BYTES: Final = 1 << 25
"""Bytes of each rank's state that is copied and written."""
REPEATS: Final = 3


def keeping(num_ranks: int, disk: Path) -> JsonObject:
    """The `keeping` of a probe file, from ranks that are started for it.

    All ranks are at work at once. `copy_bytes_per_second` are those of one rank into memory of the
    host. `write_bytes_per_second` are those of all ranks together, as a checkpoint under `disk`.
    Where nothing can be written there, this rate is left out. `start_seconds` go by from the start
    of one rank until it has joined its world. `recovery_seconds` are those from the loss of a rank
    to the next step of all. They are left out where no rank could be killed.
    """
    began = time.time()
    start_seconds = launch(_joined, nproc=1)[0] - began
    rates: JsonObject = {"start_seconds": start_seconds}
    try:
        with tempfile.TemporaryDirectory(prefix=".plait-probe-", dir=disk) as folder:
            measured = launch(_kept, num_ranks, Path(folder), nproc=num_ranks)
    except (OSError, SaveFailed):  # no right to write, or a full disk
        measured = launch(_kept, num_ranks, None, nproc=num_ranks)
    rates["copy_bytes_per_second"] = STATE_BYTES / max(copy for copy, _ in measured)
    writes = [write for _, write in measured if write is not None]
    if writes:
        rates["write_bytes_per_second"] = num_ranks * STATE_BYTES / max(writes)
    recovery = recovery_seconds(num_ranks)
    if recovery is not None:
        rates["recovery_seconds"] = recovery
    return rates


def _joined() -> float:
    """The moment at which a rank is ready to train: it has its world."""
    from plait import comm
    from plait.mesh import Mesh

    world = comm.init(Mesh(dp=1))
    moment = time.time()
    world.close()
    return moment


def _kept(num_ranks: int, folder: Path | None) -> tuple[float, float | None]:
    """The seconds of one rank to copy its state, and to save it: the quickest of several tries."""
    import torch

    from plait import comm
    from plait.checkpoint import Shard, save
    from plait.mesh import Mesh

    world = comm.init(Mesh(dp=num_ranks))
    state = torch.ones(STATE_BYTES // 4, device=world.device)
    host = torch.zeros(STATE_BYTES // 4)
    shard = Shard.whole(f"rank{world.rank}", host)
    gather = world.axis("world").gather_objects
    copies = []
    writes = []
    for number in range(REPEATS):
        world.barrier()
        began = time.perf_counter()
        host.copy_(state)
        copies.append(time.perf_counter() - began)
        if folder is None:
            continue
        world.barrier()
        began = time.perf_counter()
        path = folder / f"save-{number}"
        save(path, [shard], {}, rank=world.rank, world_size=num_ranks, gather=gather)
        writes.append(time.perf_counter() - began)
    world.close()
    return min(copies), min(writes) if writes else None
