"""`plait verify --all`: a row for each plan of a cover, and the plans that the time did not
reach.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.recomputation import with_remat
from plait.errors import PlaitError, PlanError
from plait.launcher import joined_world
from plait.launcher.main_process import say
from plait.plan.precisions import DRIFTING

if TYPE_CHECKING:
    from plait.config import Config
    from plait.plan import Plan
    from plait.verify.progress import Clock


def run_all(arguments: argparse.Namespace, clock: Clock) -> Answer:
    """The answer of a cover: `rows`, each with the keys of one proof; `ok` where all rows are.

    Raises:
        PlanError: under torchrun, or in bf16 or fp8.
    """
    from plait.verify.cover import FEW_PROBES, cover
    from plait.verify.probes import PROBES
    from plait.verify.progress import FirstStep, predicted_seconds
    from plait.verify.run import problem_of

    if joined_world() is not None:
        raise PlanError("--all starts worlds of several sizes; run it without torchrun")
    if arguments.dtype in DRIFTING:
        raise PlanError(
            f"--all proves equality; {arguments.dtype} shows how far one plan drifts: name a --plan"
        )
    config = common.read_config(arguments, with_steps=False)
    own_plan = common.plan_of(config, None)
    plans, refused = cover(own_plan, lambda text: _like(config, own_plan, text))
    say(f"plait verify: {len(plans)} plans, against one device: {', '.join(map(str, plans))}")
    step = FirstStep.of(problem_of(config)).seconds
    count = [len(PROBES) + 2, *([len(FEW_PROBES)] * (len(plans) - 1))]
    seconds = sum(
        predicted_seconds(step, plan, arguments.steps, number)
        for plan, number in zip(plans, count, strict=True)
    )
    say(f"plait verify: about {seconds:.0f} s, predicted from one step of one device")
    rows: list[Json] = []
    texts: list[str] = []
    missed: list[str] = []
    for number, plan in enumerate(plans, start=1):
        if rows and clock.is_over:
            missed.append(str(plan))
            continue
        clock.tell(number, len(plans), str(plan))
        try:
            row, text = _row(arguments, config, plan, replace(clock, speaks=False))
        except PlaitError as error:
            if plan == own_plan or error.exit_code != 2:
                raise
            refused[str(plan)] = str(error)
            continue
        rows.append(row)
        texts.append(text)
    ok = all(row["ok"] for row in rows)
    data: Json = {
        "ok": ok,
        "rows": rows,
        "plans_walked": len(rows),
        "plans_not_walked": missed,
        "plans_refused": [{"plan": plan, "reason": why} for plan, why in refused.items()],
        "paths_not_walked": sorted({name for row in rows for name in row["paths_not_walked"]}),
    }
    end = _end(data, predicted_seconds=seconds)
    return Answer(data, "\n".join([_text(data, texts), *end]), ok=ok)


def resume_plans_of(arguments: argparse.Namespace, plan: Plan) -> list[str]:
    """The plans that a saved run goes on under; none where no step is asked for."""
    if not arguments.steps_after_resume:
        return []
    return arguments.resume_plan or list(dict.fromkeys([str(plan), "dp1"]))


def _like(config: Config, own: Plan, text: str) -> Plan:
    """A plan of the cover in the precision of the config's own, checked."""
    plan = replace(common.plan_of(config, text), precision=own.precision)
    return plan.check()


def _row(
    arguments: argparse.Namespace, config: Config, plan: Plan, clock: Clock
) -> tuple[Json, str]:
    """One plan's answer and its text. The config's own plan takes all probes, others few."""
    from plait.verify.cover import FEW_PROBES
    from plait.verify.run import run

    is_own = plan == common.plan_of(config, None)
    report = run(
        with_remat(config, plan),
        plan,
        steps=arguments.steps,
        dtype=arguments.dtype,
        tolerance=arguments.tolerance,
        probes=None if is_own else FEW_PROBES,
        steps_after_resume=arguments.steps_after_resume,
        resume_plans=resume_plans_of(arguments, plan),
        clock=clock,
    )
    return report.as_dict(), report.text()


def _text(data: Json, texts: list[str]) -> str:
    """For people: a line for each plan, and the whole report of those that are wrong."""
    lines = []
    for row, text in zip(data["rows"], texts, strict=True):
        if row["ok"]:
            lines.append(f"{row['plan']:<40} equal to one device")
        else:
            lines.append(text)
    lines += [f"{plan:<40} not walked: the time is used up" for plan in data["plans_not_walked"]]
    lines += [f"{one['plan']:<40} not for this: {one['reason']}" for one in data["plans_refused"]]
    return "\n".join(lines)


def _end(data: Json, *, predicted_seconds: float) -> list[str]:
    """The last line, where the time was used up: how many plans were walked, and the cure."""
    walked, missed = data["plans_walked"], len(data["plans_not_walked"])
    if not missed:
        return []
    said = f"{walked} of {walked + missed} plans walked: the time is used up"
    if all(row["world_size"] == 1 for row in data["rows"]):
        said += ", and no plan on several ranks is proven"
    return [f"{said}; all take about {predicted_seconds:.0f} s, so give --budget more"]
