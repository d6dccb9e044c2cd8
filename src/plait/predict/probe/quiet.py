"""Whether the machine was quiet while it was measured: what other processes took of its cores.

Figures of a busy machine are wrong by as much as it was busy, and every later prediction with them.
The kernel's own counts say it (`/proc/stat`: the work of all cores, and a hypervisor's share of
them). This process and its children are subtracted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from plait.systems import own_cores

BUSY: Final = 0.1
"""The part of the cores from which other processes count."""
ATTEMPTS: Final = 2

T = TypeVar("T")
Read = Callable[[], "Moment | None"]


@dataclass(frozen=True)
class Moment:
    """Counts in seconds: of the clock, of the work of all cores, and of this process with its ended
    children.
    """

    clock: float
    all_work: float
    own_work: float
    num_cores: int

    def others_since(self, before: Moment) -> float:
        """The part of the cores, 0 to 1, that others took since `before`."""
        available = (self.clock - before.clock) * self.num_cores
        others = (self.all_work - before.all_work) - (self.own_work - before.own_work)
        return min(1.0, max(0.0, others / available)) if available > 0 else 0.0


def now() -> Moment | None:
    """The counts of this moment; None where the system has none."""
    cores = {f"cpu{number}" for number in own_cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    counts = [[int(count) for count in line[1:]] for line in lines if line and line[0] in cores]
    if not counts:
        return None
    # user, nice, system, (idle, iowait), irq, softirq, steal; guests are inside user
    ticks = sum(sum(count[:3]) + sum(count[5:8]) for count in counts)
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    own = os.times()
    spent = own.user + own.system + own.children_user + own.children_system
    return Moment(time.monotonic(), seconds, spent, len(counts))


def quietest(
    measure: Callable[[], T], say: Callable[[str], None], read: Read = now
) -> tuple[T, float | None]:
    """The result of the quietest of at most `ATTEMPTS` measurements, and the part of the cores that
    others took meanwhile. None means unknown. A busy one is said, and made again.
    """
    best: tuple[T, float] | None = None
    for attempt in range(1, ATTEMPTS + 1):
        before = read()
        result = measure()
        after = read()
        if before is None or after is None:
            return result, None
        others = after.others_since(before)
        if best is None or others < best[1]:
            best = (result, others)
        if others <= BUSY:
            break
        then = "measuring again" if attempt < ATTEMPTS else "these figures are of a busy machine"
        say(f"plait probe: other processes took {others:.0%} of the cores meanwhile; {then}")
    assert best is not None
    return best


def warning(probe: dict[str, object]) -> str | None:
    """The sentence about measurements of a busy machine; None for those of a quiet one."""
    others = probe.get("others_share")
    if not isinstance(others, float) or others <= BUSY:
        return None
    return (
        f"plait: this machine was measured while other processes took {others:.0%} of its cores; "
        "predictions for it are too slow. Run plait probe when it is quiet"
    )
