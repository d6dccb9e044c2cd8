"""The estimator against published runs: error by source, rank correlation by group, and regret of
the plan ranked first.

    python -m benchmarks.planner.validate [FILE.csv ...] [--plain name|plan] [--source ID] [--json
    FILE] [--eight-bits]

Without files: the rows in `data/`. `--plain` asks as a user would: with the plan, the preset and
the name of the framework, or with the plan and the preset alone (no knowledge of kernels, networks
and clocks that differ from the preset). `--source` prints every row of a table.
`--eight-bits` asks the runs whose linear layers multiply in eight bits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import announce
from benchmarks.planner.clusters import machine_for, preset_machine
from benchmarks.planner.rows import DATA, Case, cases, failed_cases
from plait.errors import PlanError
from plait.plan import Plan
from plait.predict.cost.frameworks import FRAMEWORKS, PLAIT
from plait.predict.cost.model.describe import describe
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Machine

Pair = tuple[Case, Estimate]


def run(chosen: Sequence[Case], plain: str = "") -> tuple[list[Pair], list[str]]:
    """The estimate of every case; cases that cannot be asked are returned with the reason."""
    machines: dict[tuple[str, ...], Machine] = {}
    pairs = []
    refused = []
    for case in chosen:
        asked = plainly(case, plain) if plain else case
        key = (case.device, case.row["gpus_per_node"], case.source, str(case.num_devices))
        if key not in machines:
            machines[key] = preset_machine(case) if plain else machine_for(case)
        job = Job(
            describe(asked.config),
            int(str(asked.config["train"]["global_batch"])),
            "adamw",
            asked.framework.runtime,
        )
        try:
            pairs.append((case, estimate_job(job, Plan.parse(asked.plan), machines[key])))
        except PlanError as reason:
            refused.append(f"{case.id}: {reason}")
    return pairs, refused


def plainly(case: Case, plain: str) -> Case:
    """The case without what only the authors of its framework know: "plan" leaves the plan and the
    preset, "name" the name of the framework beside.
    """
    runs = FRAMEWORKS[case.framework.name] if plain == "name" else PLAIT
    model = {
        key: value
        for key, value in case.config["model"].items()
        if not key.startswith(("attn", "fused"))
    }
    model["attn_implementation"] = runs.attention
    model["fused_cross_entropy"] = runs.fused_loss
    return replace(
        case,
        config={**case.config, "model": model},
        plan=case.plan.replace(" compile", ""),
        framework=runs,
    )


READ_ON_FIRST = frozenset({"09d", "09g2"})
"""Tables whose one number of memory is that of the first stage. In 09d it is that of the rank that
writes the log, the first of all (`log_throughput` of nanotron's `helpers.py`). 09g2 does not say
whose it is; its pipelines of eight samples hold what a first stage holds, and a third less than a
last stage with its logits would.
"""


def peak(case: Case, estimate: Estimate) -> float:
    """The predicted peak of the device whose memory was published: the fullest, unless its table
    says otherwise.
    """
    return (estimate.stage_memory[0] if case.source in READ_ON_FIRST else estimate.memory).total


def error(predicted: float, published: float) -> float:
    """Relative error."""
    return predicted / published - 1


def summary(errors: Iterable[float]) -> dict[str, float]:
    """Count, median of the signed error, and median, 90th percentile and worst of the absolute
    one.
    """
    signed = list(errors)
    size = sorted(map(abs, signed))
    return {
        "n": len(signed),
        "bias": statistics.median(signed),
        "median": statistics.median(size),
        "p90": size[min(len(size) - 1, int(0.9 * len(size)))],
        "worst": size[-1],
    }


def table(title: str, pairs: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Print errors by source and over all rows."""
    by_source: dict[str, list[float]] = {}
    for source, one in pairs:
        by_source.setdefault(source, []).append(one)
    rows = {source: summary(values) for source, values in sorted(by_source.items())}
    everything = [value for values in by_source.values() for value in values]
    if everything:
        rows["all"] = summary(everything)
    print(f"{title:14} {'rows':>5} {'bias':>8} {'median':>8} {'p90':>8} {'worst':>8}")
    for source, row in rows.items():
        print(
            f"{source:14} {row['n']:5.0f} "
            + " ".join(f"{row[name]:8.1%}" for name in ("bias", "median", "p90", "worst"))
        )
    print()
    return rows


MANY = 64
"""Devices above which a run is one of many."""


def flat(pairs: Iterable[Pair]) -> list[tuple[str, float]]:
    """Errors by source of runs of a data axis alone on many devices."""
    return [
        (case.source, error(estimate.step_seconds, case.seconds))
        for case, estimate in pairs
        if case.seconds and case.num_devices > MANY
        if estimate.plan.dp.size == estimate.plan.world_size
    ]


def failures(plain: str = "") -> tuple[int, int]:
    """How many plans of 09d's sweep failed, and how many of them are refused or predicted not to
    fit.
    """
    asked = failed_cases()
    pairs, refused = run(asked, plain)
    return len(asked), len(refused) + sum(not estimate.fits for _, estimate in pairs)


def contradicted(pairs: Sequence[Pair]) -> set[str]:
    """Rows that their own table contradicts: the same run with the other ZeRO stage was published
    three times as fast or more.
    """
    fastest: dict[tuple[str, ...], float] = {}
    keys = {}
    for case, _ in pairs:
        if case.seconds:
            names = (
                "model",
                "gpu_type",
                "n_gpus",
                "tp",
                "pp",
                "dp",
                "cp",
                "micro_batch",
                "n_microbatches",
                "seq_len",
                "act_ckpt",
            )
            key = (case.source, *(case.row[name] for name in names))
            keys[case.id] = (key, case.seconds)
            fastest[key] = min(case.seconds, fastest.get(key, case.seconds))
    return {id for id, (key, seconds) in keys.items() if seconds > 3 * fastest[key]}


def groups(pairs: Sequence[Pair], least: int = 4) -> list[dict[str, Any]]:
    """For each model, cluster and batch with several plans: rank correlation, and how far the plan
    ranked first is from the best.
    """
    by_group: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case, estimate in pairs:
        if case.seconds:
            batch = int(str(case.config["train"]["global_batch"]))
            plans = by_group.setdefault(f"{case.source} {case.group} batch {batch}", {})
            plans.setdefault(case.plan, []).append((estimate.step_seconds, case.seconds))
    out: list[dict[str, Any]] = []
    for name, plans in sorted(by_group.items()):
        # The same plan published twice counts once, with its mean.
        values = [
            (runs[0][0], statistics.mean(published for _, published in runs))
            for runs in plans.values()
        ]
        if len(values) < least or max(p for _, p in values) < 1.03 * min(p for _, p in values):
            continue  # within the noise of published runs there is nothing to rank
        first = min(values)[1]
        best = min(published for _, published in values)
        row = {
            "group": name,
            "n": len(values),
            "spearman": spearman(values),
            "regret": first / best - 1,
        }
        out.append({**row, "again": attainable(values)})
    return out


NOISE = 0.03
"""Of a published time, as the tables say of themselves (single steps, +-3 %)."""


def attainable(values: Sequence[tuple[float, float]], draws: int = 400) -> tuple[float, float]:
    """Median and fifth percentile of the correlation of a group with itself, run once more: what
    noise leaves to predict.
    """
    draw = random.Random(0)
    again = sorted(
        spearman([(seconds * draw.gauss(1, NOISE), seconds) for _, seconds in values])
        for _ in range(draws)
    )
    return again[draws // 2], again[draws // 20]


def spearman(values: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, ties by their mean rank."""
    first, second = (ranks([pair[side] for pair in values]) for side in (0, 1))
    mean = (len(values) - 1) / 2
    over = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    under = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return over / under**0.5 if under else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, ties by their mean."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=[DATA])
    parser.add_argument("--plain", choices=("name", "plan"), default="")
    parser.add_argument("--source")
    parser.add_argument("--eight-bits", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    announce()
    kept, dropped = cases(arguments.files or [DATA], eight_bits=arguments.eight_bits)
    pairs, refused = run(kept, arguments.plain)
    time = table(
        "step time", [(c.source, error(e.step_seconds, c.seconds)) for c, e in pairs if c.seconds]
    )
    memory = table(
        "peak memory",
        [(c.source, error(peak(c, e), c.peak_bytes)) for c, e in pairs if c.peak_bytes],
    )
    table(f"flat, over {MANY}", flat(pairs))
    fitting = sum(estimate.fits for _, estimate in pairs)
    print(f"{fitting} of {len(pairs)} runs that ran are predicted to fit")
    count, foreseen = failures(arguments.plain)
    print(
        f"{foreseen} of {count} that failed (memory or a crash, not told apart) are refused or "
        "predicted not to fit\n"
    )
    odd = contradicted(pairs)
    ranked = groups(pairs)
    sound = {
        str(group["group"]): group
        for group in groups([pair for pair in pairs if pair[0].id not in odd])
    }
    print(
        "plans of one model on one cluster: plans, Spearman (without rows that their table "
        "contradicts),"
    )
    print(
        "how much slower the plan ranked first is than the best measured, and the correlation "
        "that the same group would have"
    )
    print(
        f"with itself if it were run once more with a noise of {NOISE:.0%} (median, fifth "
        "percentile)"
    )
    for group in ranked:
        other = sound.get(str(group["group"]), group)["spearman"]
        median, least = group["again"]
        print(
            f"  {group['n']:4} {group['spearman']:6.2f} ({other:5.2f}) {group['regret']:7.1%} "
            f"{median:6.2f} {least:5.2f}  {group['group']}"
        )
    print(
        f"contradicted: {len(odd)} rows, whose same run with the other ZeRO stage was published "
        "at least three times as fast"
    )
    print("\nleft out:")
    for reason, ids in sorted(dropped.items()):
        print(f"  {len(ids):4} {reason}")
    for reason in refused:
        print(f"     1 {reason}")
    if arguments.source:
        rows_of(pairs, arguments.source)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"time": time, "memory": memory, "groups": ranked}, indent=1)
        )


def rows_of(pairs: Sequence[Pair], source: str) -> None:
    """Every row of one table with the causes of its predicted time."""
    for case, estimate in pairs:
        if case.source == source and case.seconds:
            spent = {
                k: f"{v / estimate.step_seconds:.0%}"
                for k, v in estimate.breakdown.as_dict().items()
                if v > 0
            }
            off = error(estimate.step_seconds, case.seconds)
            measured = f"{case.seconds:.3f} s, predicted {estimate.step_seconds:.3f} s ({off:+.1%})"
            print(f"{case.id} {case.num_devices} {case.plan}: {measured} {spent}")


if __name__ == "__main__":
    main()
