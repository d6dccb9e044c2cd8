"""How much of a run's time is useful when its ranks are killed, and what a recovery costs.

    python -m benchmarks.recovery.bench [--plans TEXT ...] [--seconds 24] [--every 15] [--out DIR]
    python -m benchmarks.recovery.bench --long [--kills 100] [--every 15]

Trains each plan undisturbed, then with a random rank killed every so many seconds. The first plan
is also killed at one and a half and twice that rate, for the picture. Then half of the ranks are
lost for good, and a run is timed with and without the doctor's records. `--long` does nothing but
kill the first plan's ranks `--kills` times. A signal ends it with what was measured, and so does a
run that fails. A busy machine makes all but the comparison of bits noise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.fault.kills import differences

from benchmarks.lines import lines
from benchmarks.machine import announce
from benchmarks.recovery import doctor
from benchmarks.recovery.runs import (
    CutShort,
    KillEvery,
    KillOnce,
    Trained,
    config_of,
    cut_short,
    trained,
)
from plait.errors import PlaitError
from plait.launcher.hearing import heard

PLANS = ("dp4:zero1", "pp2:1f1b dp2 mb2")
PROBE_STEPS = 12
PICTURE_RATES = (1.0, 1.5, 2.0)
LONG_KILLS = 100
PICTURE = "useful-fraction.svg"
HEAD = (
    "plan",
    "useful",
    "kills",
    "failures/hour",
    "recovery s",
    "most repeated",
    "snapshot/step",
    "checkpoint/step",
    "beside it",
    "equal bits",
)


@dataclass(frozen=True)
class Row:
    """One plan at one rate of kills.

    Attributes:
        useful_fraction: seconds of the undisturbed run over those of this one.
        recovery_seconds: from a kill to the next finished step, by recovery.
        snapshot_fraction: the share of a step that it waits for its snapshot, undisturbed.
        checkpoint_fraction: seconds that a step waits for a checkpoint, over the median step.
        slowed_fraction: seconds by which the steps after a checkpoint are longer, over the step.
        is_equal: whether bits are those of the undisturbed run; None where it has not ended.
    """

    plan: str
    useful_fraction: float
    num_kills: int
    failures_an_hour: float
    recovery_seconds: tuple[float, ...]
    most_repeated: int
    snapshot_fraction: float
    checkpoint_fraction: float
    slowed_fraction: float
    is_equal: bool | None

    def cells(self) -> tuple[str, ...]:
        """The row as a table shows it."""
        middle = statistics.median(self.recovery_seconds) if self.recovery_seconds else 0.0
        return (
            self.plan,
            f"{self.useful_fraction:.2f}",
            str(self.num_kills),
            f"{self.failures_an_hour:.0f}",
            f"{middle:.2f}",
            str(self.most_repeated),
            f"{self.snapshot_fraction:.1%}",
            f"{self.checkpoint_fraction:.1%}",
            f"{self.slowed_fraction:.1%}",
            {True: "yes", False: "NO", None: "not compared"}[self.is_equal],
        )


@dataclass
class Results:
    """Everything that was measured until now."""

    rows: list[Row] = field(default_factory=list)
    new_plan_seconds: float | None = None
    new_plan: str = ""
    doctor: doctor.DoctorCost | None = None


def measure(plan: str, seconds: float, rates: tuple[float, ...], into: Results) -> None:
    """The rows of a plan, one for each number of seconds between two kills."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probe = trained(config_of(plan, PROBE_STEPS, 1), folder / "probe")
        steps = max(PROBE_STEPS, round(seconds / probe.step_seconds))
        calm = trained(config_of(plan, steps, 1), folder / "calm")
        for number, every in enumerate(rates):
            killer = KillEvery(every, number + 1, math.ceil(seconds / every))
            shaken = trained(config_of(plan, steps, 10_000), folder / f"shaken-{number}", killer)
            row = row_of(plan, calm, shaken, is_equal=not differences(calm.folder, shaken.folder))
            into.rows.append(row)
            print(line(row.cells()), flush=True)


def endure(plan: str, every: float, num_kills: int, into: Results) -> None:
    """The row of a plan whose ranks are killed so often.

    The undisturbed seconds are those of a tenth of the steps, with the rest at its mean step.
    The whole undisturbed run comes last: its bits are compared, and its seconds are not used, so
    that the machine may do other work by then. A signal leaves the row of what has run until then.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probe = trained(config_of(plan, PROBE_STEPS, 1), folder / "probe")
        steps = max(PROBE_STEPS, round(num_kills * every / probe.step_seconds))
        tenth = trained(config_of(plan, max(PROBE_STEPS, steps // 10), 1), folder / "tenth")
        killer = KillEvery(every, 1, num_kills)
        try:
            shaken = trained(config_of(plan, steps, 10_000), folder / "shaken", killer)
        except CutShort as cut:
            if cut.run is not None and cut.run.result["recoveries"]:
                into.rows.append(endured(plan, tenth, cut.run))
                print(line(into.rows[-1].cells()), flush=True)
            raise
        row = endured(plan, tenth, shaken)
        into.rows.append(row)
        print(line(row.cells()) + "\nthe undisturbed run for the bits begins", flush=True)
        calm = trained(config_of(plan, steps, 1), folder / "calm")
        into.rows[-1] = replace(row, is_equal=not differences(calm.folder, shaken.folder))
        print(line(into.rows[-1].cells()), flush=True)


def endured(plan: str, tenth: Trained, shaken: Trained) -> Row:
    """The row of a long run beside a tenth of it, also of what a signal has left of it."""
    fraction = tenth.seconds_of(shaken.num_steps) / shaken.seconds
    return replace(row_of(plan, tenth, shaken, is_equal=None), useful_fraction=fraction)


def row_of(plan: str, calm: Trained, shaken: Trained, *, is_equal: bool | None) -> Row:
    """The row of a disturbed run beside an undisturbed one."""
    recoveries = shaken.result["recoveries"]
    moved = [one["seconds"] for one in recoveries if one["seconds"] is not None]
    repeated = [one["steps_repeated"] or 0 for one in recoveries]
    return Row(
        plan,
        calm.seconds / shaken.seconds,
        len(recoveries),
        len(recoveries) / shaken.seconds * 3600,
        tuple(moved),
        max(repeated, default=0),
        calm.waited("snapshots"),
        calm.waited("checkpoints"),
        calm.slowed(),
        is_equal,
    )


def lose_half(seconds: float, into: Results) -> None:
    """Half of four ranks are lost for good."""
    with tempfile.TemporaryDirectory() as name:
        probe = trained(config_of(PLANS[0], PROBE_STEPS, 1), Path(name) / "probe")
        steps = max(PROBE_STEPS, round(seconds / probe.step_seconds / 4))
        config = config_of(PLANS[0], steps, 0, replan="auto")
        run = trained(config, Path(name) / "half", KillOnce((1, 3), at_step=PROBE_STEPS // 2))
    recoveries = run.result["recoveries"]
    into.new_plan_seconds = max(one["seconds"] or 0.0 for one in recoveries)
    into.new_plan = run.result["plan"]


def weigh_doctor(seconds: float, into: Results) -> None:
    """Two ranks with and without the doctor's records."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probe = trained(config_of(doctor.PLAN, PROBE_STEPS, 0), folder / "probe")
        steps = max(PROBE_STEPS, round(seconds / probe.step_seconds / 4))
        into.doctor = doctor.weigh(steps, folder)


def line(cells: tuple[str, ...]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


def conclude(results: Results, out: Path) -> None:
    """Print what was measured beside its aims, and draw the picture."""
    rows = results.rows
    if not rows:
        print("nothing: no disturbed run had ended", flush=True)
        return
    moved = [seconds for row in rows for seconds in row.recovery_seconds]
    least = min(row.useful_fraction for row in rows)
    compared = [row.is_equal for row in rows if row.is_equal is not None]
    found = [
        ("useful fraction, least of all runs", "0.8 at one kill in 15 s", f"{least:.2f}"),
        ("disturbed runs with equal bits", "all", f"{sum(compared)} of {len(compared)}"),
        ("steps lost by a kill, most", "1", str(max(row.most_repeated for row in rows))),
        ("stall of a snapshot", "3 % of a step", f"{max(r.snapshot_fraction for r in rows):.1%}"),
        (
            "stall of a checkpoint",
            "1 % of a step",
            f"{max(r.checkpoint_fraction for r in rows):.1%}",
        ),
        (
            "competition of a checkpoint, by the steps after it",
            "-",
            f"{max(r.slowed_fraction for r in rows):.1%} of a step",
        ),
    ]
    if moved:
        shown = f"{statistics.median(moved):.2f} s, at most {max(moved):.2f} s"
        found.insert(3, ("from a kill to the next finished step, 4 ranks", "3 s", shown))
    if results.new_plan_seconds is not None:
        shown = f"{results.new_plan_seconds:.2f} s, to a step of '{results.new_plan}'"
        found.append(("half of 4 ranks never come back: a new plan", "5 s", shown))
    if results.doctor is not None:
        cost = results.doctor
        found += [
            ("the doctor, 2 ranks: calls of its records", "1 %", cost.counted_text()),
            ("the doctor: processor time of pairs of runs", "1 %", cost.processor.text()),
            ("the doctor: median step of pairs of runs", "1 %", cost.wall.text()),
        ]
    print("\n" + line(("what", "aim", "measured")) + "\n" + "|---" * 3 + "|")
    for cells in found:
        print(line(cells))
    out.mkdir(parents=True, exist_ok=True)
    (out / PICTURE).write_text(picture(rows))
    print(f"\n{out / PICTURE}", flush=True)


def picture(rows: list[Row]) -> str:
    """The useful fraction against failures an hour, a line for each plan."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points = series.setdefault(row.plan, [(0.0, 1.0)])
        points.append((row.failures_an_hour, row.useful_fraction))
    drawn = {plan: sorted(points) for plan, points in series.items()}
    return lines(drawn, "A run whose ranks are killed", "failures an hour", "useful fraction")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--seconds", type=float, default=24.0, help="of an undisturbed run")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--long", action="store_true", help="kills of the first plan alone")
    parser.add_argument("--kills", type=int, default=LONG_KILLS, help="of --long")
    parser.add_argument("--out", type=Path, default=Path("recovery"), help="for the picture")
    words = parser.parse_args()
    announce()
    print(line(HEAD) + "\n" + "|---" * len(HEAD) + "|", flush=True)
    results = Results()
    with heard(cut_short):
        try:
            measure_all(words, results)
        except CutShort as cut:
            print(f"\ncut short by signal {cut.number}; what was measured until then:", flush=True)
            return 128 + cut.number
        except PlaitError as error:
            print(f"\nended: {error}; what was measured until then:", flush=True)
            return 1
        finally:
            with heard(lambda number, frame: None):  # the table is printed whole
                conclude(results, words.out)
    return 0


def measure_all(words: argparse.Namespace, into: Results) -> None:
    """What the words of the command ask for."""
    if words.long:
        endure(words.plans[0], words.every, words.kills, into)
        return
    for number, plan in enumerate(words.plans):
        rates = PICTURE_RATES if number == 0 else PICTURE_RATES[:1]
        measure(plan, words.seconds, tuple(words.every / rate for rate in rates), into)
    lose_half(words.seconds, into)
    weigh_doctor(words.seconds, into)


if __name__ == "__main__":
    sys.exit(main())
