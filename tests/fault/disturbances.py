"""The disturbances: what is done to a run, and how it must end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from signal import SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1

from plait.doctor.flight import Phase
from tests.fault import acts
from tests.fault.acts import again_and_again, at_the_start, in_phase, killed, signalled
from tests.fault.disturbed import CONFIG, Disturbance, Run, leave

ON = "recovery.restarts=3"
ONCE = "recovery.restarts=1"
AUTO = "recovery.replan=auto"
LATE = "recovery.hang_seconds=60"
SAVES = "train.checkpoint_every=2"
OFTEN = "train.checkpoint_every=1"
EVALUATES = ("eval.every=1", "eval.batches=20")
DOUBLE = "precision:float64"
SGD = ("train.optimizer=sgd", "train.momentum=0.9")
EXPERTS = CONFIG.replace('"gpt"', '"llama"').replace(
    "[data]",
    "num_local_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 16\n\n[data]",
)
PACKED = CONFIG.replace(
    'python = "tests.fault.self_made:data"',
    'name = "files"\nfiles = ["TEXTS/*.txt"]\ndocument = "file"\npacking = true\nseq_len = 16\n'
    "workers = 2",
).replace("vocab_size = 64", "vocab_size = 257")
RANDOM = CONFIG.replace(
    'python = "tests.fault.self_made:data"', 'name = "random"\nseq_len = 8\nworkers = 2'
)


HANG = "recovery.hang_seconds=5"
BOTH = (ON, HANG)
ALONE = f"dp1 {DOUBLE}"

D = Disturbance


def ended(
    name: str, plan: str, act: Callable[[Run], None], settings: tuple[str, ...], code: int
) -> Disturbance:
    """A run that a signal ends, after a checkpoint from which it goes on."""
    says = "SIG[A-Z0-9]*: ended after step"
    return D(name, plan, act, settings, code=code, says=says)


def lost(
    name: str, plan: str, act: Callable[[Run], None], settings: tuple[str, ...], says: str
) -> Disturbance:
    """A run that must end, and says why."""
    return D(name, plan, act, settings, code=1, says=says, end="nothing")


def anew(name: str, plan: str, act: Callable[[Run], None], *settings: str) -> Disturbance:
    """A run that goes on under another plan, in float64."""
    end = (*SGD, *settings)
    return D(name, f"{plan} {DOUBLE}", act, end, end="numbers", calm=ALONE)


def refused(name: str, plan: str, says: str, *settings: str, words: str = "") -> Disturbance:
    """A run that does not begin."""
    more = tuple(words.split())
    return D(name, plan, leave, settings, more, code=2, says=says, end="nothing")


def own(
    name: str, kind: str, plan: str = "dp2", sample: int = 12, says: str = "", on: bool = True
) -> Disturbance:
    """A rank that fails by its own code: once, or each time where something is said."""
    settings = (ON,) if on else ()
    fault = {"kind": kind, "rank": 1, "sample": sample}
    if says:
        lasts = D(name, plan, leave, settings, code=1, says=says, end="nothing", fault=fault)
        return replace(lasts, once=not on)
    return D(name, plan, leave, settings, fault=fault)


def shrinking(run: Run) -> None:
    """A rank is lost, then another under the next plan."""
    again_and_again((1, 0), (0, 3.0))(run)


KILLED = "rank 1 was killed by SIGKILL"
STOPPED = "has stopped it|stopped process"
TOGETHER = "do not step together"
PLANS = f"recovery.replan=['pp2 {DOUBLE}','{ALONE}']"
LAUNCHER = partial(signalled, SIGKILL, "launcher")

MOMENTS = (
    D("launcher killed, then --resume auto", "dp2:zero1", LAUNCHER(7), (SAVES,), code=-9),
    D("launcher killed with restarts", "tp2", LAUNCHER(7), (ON, SAVES), code=-9),
    D("launcher killed before any checkpoint", "dp2", LAUNCHER(1), (ON,), code=-9),
    D("two ranks at once", "dp4:zero1", killed(1, 2), (ON,)),
    D("all ranks at once", "dp2:zero3", killed(0, 1), (ON,)),
    D("all of four ranks at once", "tp2 dp2", killed(0, 1, 2, 3), ("recovery.restarts=4",)),
    D("rank 0", "pp2:1f1b mb4", killed(0), (ON,)),
    D("during a save", "dp2:zero1", acts.while_saving, (ON, OFTEN)),
    D("as a process starts", "dp2", at_the_start(0.0), (ON,)),
    D("before the first step", "pp2:zb-h1 mb4", at_the_start(0.5), (ON,)),
    D("in the phase of starting", "tp2 dp2", in_phase(Phase.STARTING), (ON,)),
    D("in the phase of saving", "dp2", in_phase(Phase.SAVING), (ON, OFTEN)),
    D("while evaluating", "dp2:zero1", in_phase(Phase.EVALUATING), (ON, *EVALUATES)),
    D("in the end", "dp2:zero2", in_phase(Phase.ENDING), (ON,)),
    D("with the last step", "dp2", killed(1, at=12), (ON,)),
    D("with the last but one", "tp2", killed(0, at=11), (ON,)),
    D("another in the recovery, 0.0 s", "dp4:zero1", again_and_again((1, 0), (2, 0)), (ON,)),
    D("another in the recovery, 0.3 s", "dp4:zero1", again_and_again((1, 0), (0, 0.3)), (ON,)),
    D("another in the recovery, 0.8 s", "pp2 dp2", again_and_again((1, 0), (3, 0.8)), (ON,)),
    D("the same in the recovery", "dp2", again_and_again((1, 0), (1, 0.4), (1, 0.4)), (ON,)),
    D("the fork server and a rank", "dp2", acts.server_killed_too, (ON,)),
)

HANGS = (
    D("stopped", "dp2", signalled(SIGSTOP, "1"), BOTH),
    D("stopped, tensor parallel", "tp2 dp2", signalled(SIGSTOP, "2"), BOTH),
    D("stopped as it starts", "dp2", acts.stopped_at_the_start(0.0), (ON,)),
    D("stopped before the world", "tp2", acts.stopped_at_the_start(0.6), (ON,), says=STOPPED),
    lost("stopped before the world, alone", "dp2", acts.stopped_at_the_start(0.3), (), STOPPED),
    D("stopped in the recovery, 0.2 s", "dp2:zero1", acts.stopped_in_the_recovery(0.2), BOTH),
    D("a slow newcomer", "tp2 dp2", acts.slow_newcomer, (ON, HANG), never="hang:|was ended"),
    D("stopped in the recovery, 0.5 s", "dp4:zero1", acts.stopped_in_the_recovery(0.5), BOTH),
    D("stopped in the recovery, 0.8 s", "dp2", acts.stopped_in_the_recovery(0.8), BOTH),
)

OWN_FAULTS = (
    own("raises once", "raises"),
    own("raises always", "raises", says="a sample that cannot be read"),
    own("has no memory once", "no memory", "dp2:zero1"),
    own("memory killer", "is killed for memory"),
    own("memory killer, alone", "is killed for memory", says="exit code 137", on=False),
    own("exits with 0 once", "exits"),
    own("leaves with 0 once", "leaves", "pp2:gpipe mb4", 2),
    own("exits with 0, alone", "exits", says="rank 1", on=False),
)

SEATS = (
    lost("used up", "dp2", again_and_again((1, 0), (1, 1.5)), (ONCE, "train.steps=400"), KILLED),
    lost("replan never", "dp2", killed(1), ("recovery.snapshot_every=1",), KILLED),
    anew("replan auto", "dp4", killed(3), AUTO),
    anew("half at once, replan auto", "tp2 dp2", killed(1, 2), AUTO),
    anew("a list of plans", "dp4:zero3", shrinking, PLANS, "train.steps=150"),
)

SIGNALS = (
    ended("SIGUSR1 in the recovery", "dp2:zero1", acts.rank_then_signal, (ON,), 138),
    ended("SIGTERM to everybody", "dp2:zero1", signalled(SIGTERM, "everybody"), (ON,), 143),
    ended("SIGTERM to all in the recovery", "dp2:zero1", acts.all_in_the_recovery, (ON,), 143),
    ended("SIGINT to the group", "tp2", signalled(SIGINT, "group"), (ON,), 130),
    ended("SIGUSR1 to a rank", "pp2 mb4", signalled(SIGUSR1, "1"), (), 138),
    D("SIGTERM before the first step", "dp2", acts.early_signal, (ON,), code=143),
    D("SIGHUP to the launcher", "dp2", signalled(SIGHUP, "launcher", 7), (SAVES,), code=129),
    D("two signals to a rank", "dp2", acts.twice_to_a_rank, (LATE,), code=143, end="nothing"),
)

STATES = (
    D("checkpoints alone", "dp2:zero1", killed(1, at=5), (ON, SAVES, "recovery.snapshot_every=0")),
    D("neither", "dp2:zero1", killed(1, at=5), (ON, "recovery.snapshot_every=0")),
    D("a snapshot in three steps", "tp2", killed(1, at=5), (ON, "recovery.snapshot_every=3")),
    D("one is kept", "dp2:zero1", killed(0, at=5), (ON, OFTEN, "recovery.keep=1")),
    D("goes back after NaN", "dp2:zero1", killed(1), (ON, "recovery.on_nan=back")),
    D("muon", "dp2:zero1", killed(1), (ON, "train.optimizer=muon")),
    D("muon, tensor parallel", "tp2 dp2:zero3", killed(3), (ON, "train.optimizer=muon")),
    D("an adapter", "dp2", killed(1), (ON, "adapter.kind=lora", "adapter.rank=2")),
    D("offload", "dp2:zero1,offload", killed(1), (ON,)),
    D("context parallel, ring", "cp2:ring dp2", killed(2), (ON,)),
    D("context parallel, ulysses", "cp2:ulysses dp2:zero3", killed(1), (ON,)),
    D("experts", "ep2 dp2:zero1", killed(1), (ON,), config=EXPERTS),
    D("experts in a pipeline", "pp2:1f1b ep2 dp2 mb2", killed(3), (ON,), config=EXPERTS),
    D("threads that read ahead", "dp2:zero3", killed(1), (ON,), config=RANDOM),
    D("packed documents", "dp2:zero1", killed(1), (ON,), config=PACKED),
    D("evaluates", "pp2 dp2", killed(1, at=5), (ON, "eval.every=2", "eval.batches=2")),
    D("deterministic", "tp2:1d,sp", killed(1), (ON, "train.deterministic=true")),
    D("sums in a fixed order", "dp4", killed(2), (ON, "train.fixed_order=true")),
    D("two chunks a stage", "pp2:dualpipev mb4", killed(1), (ON,)),
    D("recomputes all", "dp2:zero3 remat:full", killed(0), (ON,)),
    D("bf16", "dp2:zero2 precision:bf16", killed(1), (ON,)),
)

REFUSED = (
    refused("too many processes", "dp2", "needs 2 ranks", ON, words="--nproc 3"),
    refused("restarts of both kinds", "dp2", "exclude each other", ON, "train.restarts=2"),
    refused("local with recovery", "dp2:local,every2", TOGETHER, ON),
    refused("PipeDream with recovery", "pp2:pipedream mb4", TOGETHER, ON),
    refused("2BW with recovery", "pp2:2bw mb4", TOGETHER, AUTO),
    refused("an unknown key", "dp2", "did you mean 'restarts'", "recovery.restart=3"),
)

CASES = (*MOMENTS, *HANGS, *OWN_FAULTS, *SEATS, *SIGNALS, *STATES, *REFUSED)
