"""`python -m tests.parity.planted.healthy`: draw right configurations, on which verify is silent.

A configuration is a plan, a model, a probe and options of training, all drawn from one seed and its
number. One in eight runs in the precision of training, one in ten is saved and loaded.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from plait.engine.composition import check_composition
from plait.errors import PlaitError, PlanError
from plait.plan import Plan, check_runnable
from plait.plan.fit import check_batch, check_config
from plait.verify.probes import PROBES
from tests.helpers.pool import Pool, RanksFailed
from tests.parity.planted.entry import Entry, judged

SIMULATED = re.compile(r"^raised by simulated rank .*$", re.M)
DATA = ("allreduce", "ring", "zero1", "zero2", "zero3", "server")
MODELS = ("mlp", "gpt", "llama", "even", "experts", "batch-norm")
TENSOR = ("tp2", "tp2:1d,sp", "tp4:2d")
PIPELINE = ("pp2 mb2", "pp2:gpipe mb3", "pp2:zb-h1 mb4", "pp2:zbv mb4")
PATIENCE_SECONDS = 170.0  # one device is slow where other work takes the processor
CONTEXT = ("cp2", "cp2:ulysses")
EXPERTS: Sequence[dict[str, Any]] = (
    {},
    {"router_aux_loss_coef": 0.1},
    {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.02},
    {"capacity_factor": 0.9, "drop_policy": "position"},
)


def drawn(number: int, seed: int = 0) -> Entry:
    """The configuration of a number."""
    source = random.Random(f"{seed}:{number}")
    entry = _drawn(source, number)
    while not _fits(entry):
        entry = _drawn(source, number)
    return entry


def _drawn(source: random.Random, number: int) -> Entry:
    model = source.choice(MODELS)
    axes = [_data(source)]
    if model != "batch-norm":
        axes.append(source.choice(("", "", "", source.choice(TENSOR))))
        axes.append(source.choice(("", "", "", source.choice(PIPELINE))))
    if model == "even":
        axes.append(source.choice(("", source.choice(CONTEXT))))
    if model == "experts":
        axes.append(source.choice(("", "ep2")))
    if "mb" not in " ".join(axes):
        axes.append(f"mb{source.choice((1, 1, 2, 3))}")
    axes.append(f"remat:{source.choice(('none', 'none', 'none', 'selective', 'full'))}")
    probe = source.choice(list(PROBES))
    how = source.choice(("probe",) * 32 + ("training",) * 5 + ("resume",) * 4)
    plan = " ".join(axis for axis in axes if axis)
    if how == "training":
        plan += source.choice((" precision:float32", " precision:bf16"))
    keys: dict[str, Any] = {
        "seed": source.randrange(1000),
        "clip_grad_norm": source.choice((None, None, 0.1)),
        "global_batch": source.choice((12, 12, 8)),
        "weight_decay": source.choice((0.1, 0.01)),
    }
    model_keys = source.choice(EXPERTS) if model == "experts" else {}
    return Entry(
        f"{number}: {model}, {plan}, {probe if how == 'probe' else how}",
        plan,
        "",
        "",
        list,
        probe=probe,
        model=model,
        how=how,
        keys=keys,
        model_keys=model_keys,
    )


def _data(source: random.Random) -> str:
    size = source.choice((1, 2, 2, 2, 3))
    return f"dp{size}:{source.choice(DATA)}" if size > 1 else ""


def _fits(entry: Entry) -> bool:
    """Whether the rules let the plan, its model and its batch pass, on at most four ranks."""
    problem = entry.problem
    try:
        plan = Plan.parse(entry.plan).check()
        if plan.world_size > 4:
            return False
        check_runnable(plan)
        check_batch(plan, problem.train.global_batch)
        check_config(plan, {**problem.model, "seq_len": 8 if entry.model == "even" else 7})
        check_composition(plan)
    except PlanError:
        return False
    wide = plan.tp.size > 1 or plan.cp.size > 1
    if wide and entry.model in ("gpt", "llama", "mlp"):  # their odd sizes do not divide
        return False
    if entry.probe == "last-batch" and plan.cp.size > 1:
        return False
    return not (entry.model == "experts" and (plan.tp.sequence_parallel or plan.tp.mode == "2d"))


@dataclass(frozen=True)
class Verdict:
    """What verify says of a right configuration.

    Attributes:
        kind: silent; refused, where no answer was possible; rounding, where the answer is no and
            names rounding as its cause; alarm, where it names anything else.
        text: the refusal or the report; empty where verify is silent.
    """

    kind: str
    text: str = ""


def verdict(entry: Entry, pool: Pool) -> Verdict:
    """Verify's answer to a right configuration; only `silent` and `refused` are no false alarm."""
    try:
        answer = judged(entry, partial(pool.run, group_timeout_seconds=PATIENCE_SECONDS))
    except PlaitError as error:  # what was drawn diverges, or does not fit its model
        return Verdict("refused", str(error))
    except RanksFailed as error:
        return _of_ranks(str(error))
    report = answer.report
    if report.ok:
        return Verdict("silent")
    if all("does not apply" in note for note in report.notes) and not report.parts:
        return Verdict("refused", "\n".join(report.notes))
    causes = {finding.cause for finding in report.all_findings}
    kind = "rounding" if causes == {"rounding"} else "alarm"
    return Verdict(kind, report.text())


def _of_ranks(said: str) -> Verdict:
    """Refused where every rank that raised says so in a sentence of the package.

    Ranks that wait for one that raised are said to hang, and are not asked.
    """
    parts = re.split(r"rank \d+ (raised|hung):", said)
    raised = [text for kind, text in zip(parts[1::2], parts[2::2], strict=True) if kind == "raised"]
    last = [SIMULATED.sub("", text).strip().rsplit("\n", 1)[-1] for text in raised]
    is_refusal = bool(last) and all(
        line.startswith("plait.errors.") and "RankFailed" not in line for line in last
    )
    return Verdict("refused", last[0]) if is_refusal else Verdict("alarm", said)


def main() -> int:
    """0 where verify calls no right configuration wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.planted.healthy")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pool = Pool()
    counts: Counter[str] = Counter()
    last = arguments.first + arguments.count
    for number in range(arguments.first, last):
        entry = drawn(number, arguments.seed)
        said = verdict(entry, pool)
        counts[said.kind] += 1
        print(f"{said.kind}: {entry.name}", flush=True)
        if said.text:
            print(f"{entry.keys} {entry.model_keys}\n{said.text}", flush=True)
    pool.close()
    print(
        f"seed {arguments.seed}, {arguments.first} to {last - 1}: {counts['silent']} of "
        f"{arguments.count} right configurations silent, {counts['refused']} refused, "
        f"{counts['rounding']} called wrong by rounding, {counts['alarm']} other false alarms"
    )
    return 1 if counts["rounding"] + counts["alarm"] else 0


if __name__ == "__main__":
    sys.exit(main())
