"""What 2, 4 and 8 ranks cost over the step of one process, by axis, and where it goes: `python -m
benchmarks.hybrid.scaling`.

The ranks share this machine's cores, so the wall clock says little; the work of a whole step is the
same under every plan, and the processor time of all ranks together is what an axis adds: overhead =
(ranks' processor seconds) / (one process's) - 1. It is broken down by item with the engine's own
timeline, whose clock is set to processor time: a rank that waits for another sleeps, so what an
axis costs there is the work of its messages alone. `8 apart` are eight processes that have an
eighth of the samples each and do not talk: what sharing the cores and their caches, smaller
products and eight updates cost by themselves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import plait
from benchmarks.hybrid.subject import Subject
from benchmarks.machine import announce
from plait.plan import Plan
from plait.trace import Timeline

SUBJECT = Subject(hidden_size=128, seq_len=128, num_samples=16)
PLANS = (
    "mb2", "mb4", "mb8", "2 apart", "4 apart", "8 apart", "dp2", "dp4", "dp8", "dp2:zero3",
    "dp4:zero3", "dp8:zero3",
    "tp2", "tp4", "tp8", "pp2 mb4", "pp4 mb4", "pp8 mb8", "cp2", "cp4", "cp8", "pp2 tp2 mb4",
    "pp2 tp2 dp2 mb4",
)  # fmt: skip
ITEMS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "U": "update"}
COLUMNS = ("forward", "backward", "update", "messages", "rest")


def run(text: str, steps: int) -> list[dict[str, Any]]:
    """What `measure` tells of each rank of a plan, or of each process of `N apart`."""
    number, _, apart = text.partition(" ")
    if apart != "apart":
        return plait.launch(measure, text, steps, SUBJECT, nproc=Plan.parse(text).world_size)
    count = int(number)
    subject = replace(SUBJECT, num_samples=SUBJECT.num_samples // count)
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        return pool.starmap(measure, [("mb1", steps, subject)] * count, chunksize=1)


def measure(text: str, steps: int, subject: Subject) -> dict[str, Any]:
    """Medians over steps of this rank's wall and processor seconds, and of its processor seconds by
    item.
    """
    world = subject.join(text)
    engine = subject.engine(text, world)
    batch = subject.share(world)
    Timeline.now = lambda self: time.process_time()  # type: ignore[method-assign]
    walls = []
    works = []
    items = []
    for step in range(steps + 2):
        world.axis("world").barrier()
        wall = time.perf_counter()
        work = time.process_time()
        result = engine.step(batch)
        wall = time.perf_counter() - wall
        work = time.process_time() - work
        if step >= 2:
            walls.append(wall)
            works.append(work)
            items.append(by_item(result.timeline, work))
    world.close()
    names = {name for item in items for name in item}
    medians = {name: statistics.median(item[name] for item in items) for name in sorted(names)}
    return {"wall": statistics.median(walls), "work": statistics.median(works), "items": medians}


def by_item(told: Timeline, total: float) -> dict[str, float]:
    """Seconds of one step: forward, backward, update, each axis's messages, and what lies outside
    all of them.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for span in told.spans:
        inside = sum(
            c.exposed_seconds
            for c in told.comms
            if span.start_seconds <= c.stop_seconds <= span.stop_seconds
        )
        found[ITEMS.get(span.kind, "messages")] += span.seconds - inside
    found["messages"] += sum(comm.exposed_seconds for comm in told.comms)
    found["rest"] = total - sum(found.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, help="the raw numbers, as JSON; plans that are there are not run again"
    )
    given = parser.parse_args()
    announce()
    rows = json.loads(given.out.read_text()) if given.out is not None and given.out.exists() else {}
    for text in ("mb1", *given.plans):
        if text not in rows:
            rows[text] = run(text, given.steps)
        if given.out is not None:
            given.out.write_text(json.dumps(rows))
    print(table(rows))


def table(rows: dict[str, Any]) -> str:
    """The first row is one process; below it, what each plan adds to it."""
    alone = rows["mb1"][0]
    lines = [
        f"| plan | ranks | wall ms | processor ms, all ranks | overhead | "
        f"{' | '.join(f'{name} ms' for name in COLUMNS)} |",
        "|---|---|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for text, ranks in rows.items():
        work = sum(rank["work"] for rank in ranks)
        wall = max(rank["wall"] for rank in ranks)
        spent = [sum(rank["items"].get(name, 0.0) for rank in ranks) for name in COLUMNS]
        told = [
            f"{1e3 * (own - alone['items'].get(name, 0.0)):+.0f}"
            for name, own in zip(COLUMNS, spent, strict=True)
        ]
        first = text == "mb1"
        shown = [f"{1e3 * own:.0f}" for own in spent] if first else told
        overhead = "" if first else f"{work / alone['work'] - 1:+.0%}"
        lines.append(
            f"| {text} | {len(ranks)} | {1e3 * wall:.0f} | {1e3 * work:.0f} | {overhead} | "
            f"{' | '.join(shown)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
