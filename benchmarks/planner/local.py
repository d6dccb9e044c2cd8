"""Random plans of the example models on this machine: predicted from its probe alone, and measured.

    python -m benchmarks.planner.local probe                     (measures the machine; seconds)
    python -m benchmarks.planner.local run [--from A] [--to B]   (runs plans A to B of the 30, a few
    seconds each)
    python -m benchmarks.planner.local table [--work]            (prints prediction beside
    measurement of what was run)

Plans are drawn once from a seed (`--seed` draws others, to hold the model against plans that nobody
has looked at); what was measured is kept in a file, so a run can be cut into slices and repeated.
Of all repetitions the fastest step counts, and of all probes the best of each number: what else
runs on a machine only adds. A run during which other processes took more than `MOST_OTHERS` of the
cores is made again, `TRIES` times in all. Nothing but the probe enters a prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import announce
from benchmarks.planner.validate import spearman
from plait.cluster import Cluster, read_probe
from plait.errors import PlaitError
from plait.launcher import launch
from plait.plan import Plan
from plait.predict.cost import Estimate, estimate
from plait.predict.cost.api import job_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.step import work_seconds

SEED = 7
NUM_PLANS = 30
WARM = 2
FEWEST_STEPS = 8
MOST_STEPS = 24
LONG_SECONDS = 1.5
"""Steps of a run: as many as take `LONG_SECONDS`, so that whatever else wakes up on the machine
misses one of them.
"""
MOST_OTHERS = 0.04
TRIES = 3
TEXT = {"name": "stdlib", "seq_len": 128}
GPT = {
    "name": "gpt",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
GPT |= {"vocab_size": 256, "max_position_embeddings": 128}
LLAMA = {
    "name": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA |= {"intermediate_size": 512, "vocab_size": 256, "max_position_embeddings": 128}
EXPERTS = {
    **LLAMA,
    "hidden_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
MLP = {
    "name": "mlp",
    "in_features": 64,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "out_features": 10,
}
RESNET = {"name": "resnet", "depth": 18, "num_classes": 10, "in_channels": 1, "width": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "data": TEXT, "train": {"global_batch": 16}},
    "llama": {"model": LLAMA, "data": TEXT, "train": {"global_batch": 16}},
    "experts": {"model": EXPERTS, "data": TEXT, "train": {"global_batch": 16}},
    "mlp": {"model": MLP, "data": {"name": "random"}, "train": {"global_batch": 256}},
    "resnet": {
        "model": RESNET,
        "data": {"name": "random", "image_size": 8},
        "train": {"global_batch": 64},
    },
}
DEALT = ("gpt", "llama", "gpt", "llama", "experts", "gpt", "mlp", "llama", "experts", "resnet")
"""Which model each plan is of, round and round."""
DATA = ("allreduce", "ring", "server", "zero1", "zero2", "zero3")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved,v2")


def plans(seed: int = SEED, count: int = NUM_PLANS) -> list[tuple[str, str]]:
    """(model, plan) `count` times: drawn from the seed, those that cannot run drawn again."""
    draw = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < count:
        family = DEALT[len(found) % len(DEALT)]
        text = _drawn(draw, family)
        if (family, text) not in found and runs(family, text):
            found.append((family, text))
    return found


def _drawn(draw: random.Random, family: str) -> str:
    """A plan of at most eight ranks."""
    terms = []
    left = draw.choice((1, 2, 2, 4, 4, 8))
    micro_batches = draw.choice((1, 1, 2, 4))
    axes = (
        ["tp", "pp", "cp", "dp"]
        if family not in {"resnet", "mlp"}
        else ["pp", "dp"]
        if family == "mlp"
        else ["dp"]
    )
    draw.shuffle(axes)
    for axis in axes:
        size = left if axis == axes[-1] else draw.choice([n for n in (1, 2, 4, 8) if n <= left])
        left //= size
        if size == 1:
            continue
        if axis == "tp":
            modes = ["", ":1d,sp"] + [":2d"] * (size == 4) + [":2.5d,depth2", ":3d"] * (size == 8)
            modes = [""] if family == "experts" else modes
            terms.append(f"tp{size}{draw.choice(modes)}")
        elif axis == "pp":
            terms.append(f"pp{size}:{draw.choice(SCHEDULES)}")
            micro_batches = max(micro_batches, size)
        elif axis == "cp":
            terms.append(f"cp{size}:{'ring' if size == 8 else draw.choice(('ring', 'ulysses'))}")
        else:
            terms.append(f"dp{size}:{draw.choice(DATA)}")
    terms += [f"mb{micro_batches}"] if micro_batches > 1 else []
    terms += [f"remat:{draw.choice(('full', 'selective'))}"] if draw.random() < 0.2 else []
    return str(Plan.parse(" ".join(terms) or "dp1"))


def runs(family: str, text: str) -> bool:
    """Whether the command line would start it."""
    from plait.cli import common
    from plait.config import load

    try:
        plan = common.plan_of(load(CONFIGS[family]), text)
        predict(family, text, Cluster.parse("h100x8"))
    except PlaitError:
        return False
    if plan.pp.size > 1 and plan.dp.strategy == "server":  # which only the engine refuses
        return False
    return plan.world_size <= 8


def predict(family: str, text: str, cluster: Cluster) -> Estimate:
    """The estimate of a plan on this machine."""
    return estimate(CONFIGS[family], text, cluster)


def measure(family: str, text: str) -> dict[str, Any]:
    """Run some steps, again if others were on the cores: seconds of the fastest step and of its
    work, peak memory of the fullest rank, traffic of the busiest by axis, and the share of the
    cores that others took.
    """
    tries: list[dict[str, Any]] = []
    while len(tries) < TRIES and not (tries and tries[-1]["others"] <= MOST_OTHERS):
        tries.append(_measured_once(family, text))
    return min(tries, key=lambda one: one["seconds"])


def _measured_once(family: str, text: str) -> dict[str, Any]:
    found = launch(rank_of_run, family, text, nproc=Plan.parse(text).world_size)
    axes = {axis for one in found for axis in one.sent}
    cores = len(os.sched_getaffinity(0))
    busy = max(found, key=lambda one: one.elapsed)
    return {
        "family": family,
        "plan": text,
        "seconds": max(one.seconds for one in found),
        "work": sum(one.work for one in found),
        "peak": max(one.peak for one in found),
        "traffic": {axis: max(one.sent.get(axis, 0) for one in found) for axis in sorted(axes)},
        "others": (busy.busy - sum(one.spent for one in found)) / (cores * busy.elapsed),
    }


@dataclass(frozen=True)
class OfRank:
    """What one rank saw: the fastest step and the processor's least seconds in one, peak memory and
    traffic; and of all steps together the time that passed, what the cores did in it and what this
    rank did.
    """

    seconds: float
    work: float
    peak: int
    sent: dict[str, int]
    elapsed: float
    busy: float
    spent: float


def _busy_seconds() -> float:
    """What all cores of the machine have done since it started, for whomever."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def rank_of_run(family: str, text: str) -> OfRank:
    """What `plait train` does in a rank; the traffic is that of the last step, as a pipeline tells
    shapes once.
    """
    from plait.config import load
    from plait.engine.build import join_world
    from plait.run.assemble import assemble
    from plait.run.metrics import peak_memory_bytes

    plan = Plan.parse(text)
    world = join_world(plan)
    training = assemble(load(CONFIGS[family]), plan, world)
    batches = iter(training.loader)
    everyone = world.axis("world")
    results = []
    work = []
    everyone.barrier()
    began_all = time.perf_counter()
    busy = _busy_seconds()
    own = time.process_time()
    for number in range(MOST_STEPS):
        batch = next(batches)
        began = time.process_time()
        results.append(training.engine.step(batch))
        work.append(time.process_time() - began)
        spent = sum(result.seconds for result in results)
        if number + 1 >= FEWEST_STEPS and max(everyone.gather_objects(spent)) > LONG_SECONDS:
            break
    spent = time.process_time() - own
    busy = _busy_seconds() - busy
    elapsed = time.perf_counter() - began_all
    seconds = min(result.seconds for result in results[WARM:])
    world.close()
    return OfRank(
        seconds,
        min(work[WARM:]),
        peak_memory_bytes(),
        results[-1].ledger.by_axis(),
        elapsed,
        busy,
        spent,
    )


RATES = ("peak_flops", "memory_bandwidth", "link_bandwidth")


def best_of(one: Any, other: Any, name: str = "") -> Any:
    """Of two probes the higher rates and the shorter times, number by number; of a link, [seconds,
    rate], both.
    """
    if isinstance(one, dict):
        keep = {"measured", "num_devices", "memory_bytes", "memory", "name", "is_cpu"}
        inner = {key: key if name not in RATES else name for key in one}
        return {
            key: other[key] if key in keep else best_of(one[key], other[key], inner[key])
            for key in one
        }
    if isinstance(one, list):
        return [min(one[0], other[0]), max(one[1], other[1])]
    return (max if name in RATES else min)(one, other)


def work(family: str, text: str, cluster: Cluster) -> float:
    """Predicted seconds of work of all ranks in a step."""
    tables = config_tables(CONFIGS[family])
    plan = Plan.parse(text)
    return work_seconds(job_of(tables, plan), plan, machine_of(cluster))


def table(measured: list[dict[str, Any]], cluster: Cluster, by_work: bool = False) -> None:
    """Prediction beside measurement, and what they have in common: of step times, or of the
    processor's time of all ranks.
    """
    what = "work, ms" if by_work else "step, ms"
    print(
        f"{'model':8} {'plan':44} {what:>8} {'pred.':>7} {'error':>7} {'MB':>5} {'pred.':>5} "
        f"{'error':>7}  traffic"
    )
    times = []
    memories = []
    equal = 0
    by_family: dict[str, list[tuple[float, float]]] = {}
    for row in measured:
        guess = predict(row["family"], row["plan"], cluster)
        seconds = work(row["family"], row["plan"], cluster) if by_work else guess.step_seconds
        found = row["work"] if by_work else row["seconds"]
        off = seconds / found - 1
        memory = guess.memory.total / row["peak"] - 1
        axes = [
            axis
            for axis in guess.traffic
            if round(guess.traffic[axis]) != round(row["traffic"].get(axis, 0))
        ]
        times.append(off)
        memories.append(abs(memory))
        equal += not axes
        by_family.setdefault(row["family"], []).append((seconds, found))
        said = (
            "equal"
            if not axes
            else " ".join(
                f"{a} {guess.traffic[a] / max(1, row['traffic'].get(a, 0)) - 1:+.1%}" for a in axes
            )
        )
        print(
            f"{row['family']:8} {row['plan']:44} {found * 1e3:8.1f} {seconds * 1e3:7.1f} "
            f"{off:7.1%} "
            f"{row['peak'] / 1e6:5.0f} {guess.memory.total / 1e6:5.0f} {memory:7.1%}  {said}"
        )
    everything = [pair for pairs in by_family.values() for pair in pairs]
    print(
        f"\n{len(measured)} plans: {what} median error {statistics.median(map(abs, times)):.1%} "
        f"(bias {statistics.median(times):+.1%}), Spearman {spearman(everything):.2f}; "
        f"peak memory median error {statistics.median(memories):.1%}, worst {max(memories):.1%}; "
        f"traffic equal in {equal}"
    )
    for family, pairs in by_family.items():
        print(f"  {family:8} {len(pairs):3} plans, Spearman {spearman(pairs):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("probe", "run", "table", "list"))
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="last", type=int, default=None)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--plans", type=int, default=NUM_PLANS, help="how many are drawn")
    parser.add_argument(
        "--work",
        action="store_true",
        help="compare the processor's time, which others on the machine do not change",
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/plait-local"))
    arguments = parser.parse_args()
    announce()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    probe = arguments.folder / "probe.json"
    file = arguments.folder / f"measured{arguments.seed}.json"
    drawn = list(enumerate(plans(arguments.seed, arguments.plans)))
    measured: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    if arguments.what == "list":
        print("\n".join(f"{index:3} {family:8} {text}" for index, (family, text) in drawn))
    elif arguments.what == "probe":
        from plait.predict.probe.measure import measure_here

        earlier = json.loads(probe.read_text()) if probe.exists() else None
        measure_here(probe)
        if earlier is not None:
            probe.write_text(json.dumps(best_of(earlier, json.loads(probe.read_text())), indent=1))
    elif arguments.what == "run":
        for index, (family, text) in drawn[arguments.first : arguments.last]:
            new = measure(family, text)
            old = measured.get(str(index))
            new["seconds"] = (
                min(new["seconds"], old["seconds"])
                if old and old["plan"] == text
                else new["seconds"]
            )
            measured[str(index)] = new
            file.write_text(json.dumps(measured, indent=1))
            print(
                index,
                family,
                text,
                f"{new['seconds'] * 1e3:.1f} ms, others {new['others']:.0%}",
                flush=True,
            )
    else:
        rows = [measured[key] for key in sorted(measured, key=int)]
        table(rows, Cluster.local(read_probe(probe)), arguments.work)


if __name__ == "__main__":
    main()
