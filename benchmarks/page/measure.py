"""What ranks of the page measure: seconds and processor seconds of steps, memory, and bytes."""

from __future__ import annotations

import gc
import resource
import time
from collections import defaultdict
from dataclasses import dataclass, field

from benchmarks.page.systems import DDP, FOOTPRINT_CASES, LINK_CASES, one_thread, start
from plait import comm
from plait.cluster.products import ProductTable
from plait.mesh import Mesh

WARM = 2
FEWEST = 4  # rounds whatever the time
NUM_FILLED = 3  # steps to the peak: the first one makes the optimizer's state


@dataclass(frozen=True)
class Group:
    """Systems that take turns in the same ranks."""

    case: str
    family: str
    size: int
    systems: tuple[str, ...]
    limit_seconds: float


@dataclass
class Taken:
    """Seconds of each round and processor seconds of each step, by system, and what failed."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    processor: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, str] = field(default_factory=dict)


def measure_steps(group: Group, table: ProductTable) -> Taken:
    """Runs in every rank. No round begins after the limit."""
    one_thread()
    began = time.monotonic()
    everyone = comm.init(Mesh(dp=group.size), backend="gloo")
    taken = Taken()
    steps = {}
    for name in group.systems:
        try:
            steps[name] = start(name, LINK_CASES[group.case], group.size, table)
            steps[name]()
        except Exception as error:  # named on the page
            taken.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            steps.pop(name, None)
    gc.disable()
    index = 0
    while True:
        spent = max(everyone.axis("world").gather_objects(time.monotonic() - began))
        if index >= WARM + FEWEST and spent > group.limit_seconds:
            break
        for name, step in steps.items():
            everyone.barrier()
            started = time.perf_counter()
            used = time.process_time()
            step()
            used = time.process_time() - used
            everyone.barrier()
            if index >= WARM:
                taken.seconds[name].append(time.perf_counter() - started)
                taken.processor[name].append(used)
        gc.collect()
        index += 1
    gc.enable()
    return Taken(dict(taken.seconds), dict(taken.processor), taken.failed)


@dataclass(frozen=True)
class Footprint:
    """Of one rank: peak bytes beyond those after `import torch`, and bytes that it sends a step.

    Pages that ranks share count in shares. Bytes are None for systems that do not count them.
    """

    peak_bytes: int
    resident_bytes: int
    sent_bytes: float | None


def load_peers() -> None:
    """Import what peers import when they begin, so that no system's code counts as its memory."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401


def measure_footprint(case: str, name: str, size: int, table: ProductTable) -> Footprint:
    """Runs in every rank of a launch of its own."""
    from benchmarks.data_parallel.bench import PeakOfShares

    one_thread()
    load_peers()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with PeakOfShares() as shares:
        step = start(name, FOOTPRINT_CASES[case], size, table, device="meta")
        result = None
        for _ in range(NUM_FILLED):
            result = step()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ledger = getattr(result, "ledger", None)
    sent = None if ledger is None else float(sum(ledger.by_axis().values()))
    return Footprint(shares.peak_bytes, after - before, sent)


def base_of(group: Group) -> str:
    """The system that ratios refer to."""
    return DDP if DDP in group.systems else group.systems[0]
