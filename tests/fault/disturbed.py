"""`plait train` is disturbed in every way that a machine, a scheduler or a user has.

    python -m tests.fault.disturbed [--only WORD ...] [--seconds S] [--list]

Each disturbance is a run of its own (`tests.fault.disturbances`). It must end with the bits of a
run that nobody disturbed, or with one clear sentence and the right exit code. No process of it may
stay behind, and its metrics have each step once. Prints a line for each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.checkpoint import Checkpoint
from plait.doctor.record import RankSnapshot, Records
from tests.fault.kills import differences, largest_difference

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0
GONE_SECONDS = 60.0  # a fork server that has loaded torch takes long on a busy machine
STEPS = 12
FAR = 1e-10
BESIDE = ("recovery.", "train.checkpoint_every", "eval.")  # settings that change no number
CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 4
hidden_size = 16
num_attention_heads = 4
intermediate_size = 32
vocab_size = 64

[data]
python = "tests.fault.self_made:data"

[train]
steps = 12
global_batch = 8
lr = 1e-2
linear_product = "rule"

[cluster]
name = "rtx4090x4"
"""


@dataclass(frozen=True)
class Disturbance:
    """A plan, what is done to its run, and the end that is expected.

    Attributes:
        act: does it to a run that has begun.
        settings: of the config, as words of `--set`.
        code: the exit code; with one that is not 0 the run is resumed, and must end well then.
        says: a pattern that stderr holds; `never` one that it does not.
        end: `bits` of the calm run, `numbers` within `FAR` of it, or `nothing` where it cannot end.
        fault: of `tests.fault.self_made`; its mark is made here where `once` holds.
        config: in place of `CONFIG`.
    """

    name: str
    plan: str
    act: Callable[[Run], None]
    settings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    code: int = 0
    says: str = ""
    never: str = ""
    end: str = "bits"
    fault: dict[str, Any] = field(default_factory=dict)
    once: bool = True
    config: str = CONFIG
    calm: str = ""

    def command(self, out: Path, plan: str) -> list[str]:
        """The command line of a run."""
        words = [sys.executable, "-m", "plait", "train", str(out.parent / "run.toml")]
        words += ["--plan", plan, "--out", str(out), *self.words]
        return [*words, "--set", *self.settings] if self.settings else words


class Run:
    """A run that goes on: its launcher, its ranks, its folder."""

    def __init__(self, case: Disturbance, folder: Path, *resume: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._said = (folder.parent / "said.txt").open("a")
        fault = dict(case.fault)
        if fault and case.once:
            fault["mark"] = str(folder.parent / "mark")
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DISTURBED": self.mark,
            "SELF_MADE": json.dumps(fault),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        }
        self.process = subprocess.Popen(
            [*case.command(folder, case.plan), *resume],
            cwd=folder.parent,
            env=variables,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,
        )

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def wait_until(self, holds: Callable[[], bool]) -> bool:
        """Wait for something; False where the run ends before."""
        end = time.monotonic() + LIMIT_SECONDS
        while not holds():
            if self.is_over or time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    def steps(self) -> int:
        """The steps that metrics tell of, repeated ones counted again."""
        try:
            return (self.folder / "metrics.jsonl").read_text().count("\n")
        except OSError:
            return 0

    def views(self) -> dict[int, RankSnapshot]:
        """The records of its living ranks."""
        found = Records(self.folder / "doctor").views()
        return {rank: view for rank, view in found.items() if view.process_state()}

    def rank(self, number: int) -> int:
        """The process of a rank, once it has one."""
        self.wait_until(lambda: number in self.views())
        views = self.views()
        return views[number].pid if number in views else 0

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to ranks, as nearly at once as can be."""
        for pid in [self.rank(rank) for rank in ranks]:
            if pid:
                send(pid, number)

    def processes(self) -> dict[int, str]:
        """All living processes of the run, with their command lines."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() not in environ.read_bytes():
                    continue
                stat = (environ.parent / "stat").read_text()
                words = (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[0] not in ("Z", "X"):
                state, parent = stat.rpartition(")")[2].split()[:2]
                text = words.decode(errors="replace")
                found[int(environ.parent.name)] = f"{text} (state {state}, of {parent})"
        return found

    def finish(self) -> tuple[int | None, str, list[str]]:
        """The exit code, what was said, and the processes that have stayed behind."""
        try:
            code = self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            send(self.process.pid, signal.SIGKILL)
            self.process.wait()
        end = time.monotonic() + GONE_SECONDS
        while self.processes() and time.monotonic() < end:
            time.sleep(0.05)
        left = [f"{pid} {words[:90]}{words[-24:]}" for pid, words in self.processes().items()]
        for pid in self.processes():
            send(pid, signal.SIGKILL)
        self._said.close()
        return code, (self.folder.parent / "said.txt").read_text(), left


def send(pid: int, number: int) -> None:
    """Send a signal; a process that has gone is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class Judge:
    """Runs disturbances, and compares each with the calm run of its config."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calm: dict[object, Path] = {}
        self._texts = folder / "texts"
        self._texts.mkdir()
        for number in range(40):
            words = f"document {number} of several, all of other lengths. " * (number % 7 + 1)
            (self._texts / f"{number}.txt").write_text(words)

    def judge(self, case: Disturbance) -> tuple[list[str], str]:
        """What is wrong, and what the run has said."""
        home = self._folder / re.sub(r"\W+", "-", case.name)
        home.mkdir()
        (home / "run.toml").write_text(case.config.replace("TEXTS", str(self._texts)))
        run = Run(case, home / "run")
        try:
            case.act(run)
        finally:
            code, said, left = run.finish()
        wrong = [f"left behind: {one}" for one in left]
        if code != case.code:
            wrong.append(f"exit code {code} instead of {case.code}")
        if case.says and not re.search(case.says, said):
            wrong.append(f"does not say '{case.says}'")
        if case.never and re.search(case.never, said):
            wrong.append(f"says '{case.never}'")
        if "Traceback" in said:
            wrong.append("a traceback")
        if code and case.end != "nothing":
            again = Run(case, home / "run", "--resume", "auto")
            code, said, left = again.finish()
            wrong += [f"left behind: {one}" for one in left]
            wrong += [f"the resumed run has exit code {code}"] if code else []
        if case.end != "nothing" and not wrong:
            wrong += self._compared(case, home / "run")
        shutil.rmtree(home, ignore_errors=True)
        return wrong, said

    def _compared(self, case: Disturbance, run: Path) -> list[str]:
        """The differences to the calm run, in the last checkpoint and in the metrics."""
        calm = self._calm_run(case)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        last = Checkpoint.open(calm).meta["step"]
        wrong = [] if steps == list(range(1, last + 1)) else [f"metrics of the steps {steps}"]
        if case.end == "bits":
            return wrong + differences(calm, run)
        found = largest_difference(calm, run)
        return wrong if found < FAR else [*wrong, f"differs by {found:.1e}"]

    def _calm_run(self, case: Disturbance) -> Path:
        plan = case.calm or case.plan
        quiet = tuple(one for one in case.settings if not one.startswith(BESIDE))
        key = (plan, case.config, quiet)
        if key not in self._calm:
            home = self._folder / f"calm-{len(self._calm)}"
            home.mkdir()
            (home / "run.toml").write_text(case.config.replace("TEXTS", str(self._texts)))
            words = Disturbance("", plan, leave, quiet).command(home / "run", plan)
            environment = {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            }
            done = subprocess.run(
                words,
                cwd=home,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_SECONDS,
            )
            if done.returncode:
                raise RuntimeError(f"the calm run failed: {done.stderr[-600:]}")
            self._calm[key] = home / "run"
        return self._calm[key]


def leave(run: Run) -> None:
    """Do nothing to a run."""


def main() -> int:
    """Disturb runs one after the other."""
    from tests.fault.disturbances import CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="those whose name has one of these words")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    words = parser.parse_args()
    chosen = [
        case for case in CASES if not words.only or any(one in case.name for one in words.only)
    ]
    if words.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    end = time.monotonic() + words.seconds
    judged = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for case in chosen:
            if time.monotonic() > end:
                print(f"out of time before '{case.name}'")
                break
            began = time.monotonic()
            try:
                wrong, said = judge.judge(case)
            except Exception as error:  # the others are to be seen too
                wrong, said = [f"{type(error).__name__}: {error}"], ""
            judged += 1
            failed += bool(wrong)
            verdict = f"WRONG: {wrong[:3]}" if wrong else "right"
            seconds = time.monotonic() - began
            print(f"{case.name:58} {case.plan:28} {seconds:5.0f} s  {verdict}", flush=True)
            if wrong or os.environ.get("SHOW"):
                print(said[-2500:], flush=True)
    print(f"{judged - failed} of {judged} right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
