"""The parts that verbs share: the config with its overrides, the plan, and the checks that need no
rank.

Everything that can be refused is refused here, before a process exists. So bad input costs
milliseconds and is said once, not once a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.answer import Json
from plait.cli.block_choices import with_numbers, with_words
from plait.cli.parser import UsageError
from plait.cli.unused_keys import tell_unused
from plait.errors import WRITE_ELSEWHERE, ClusterError, ConfigError, PlanError
from plait.launcher import joined_world
from plait.plan import (
    Plan,
    check_batch,
    check_kept,
    check_restarts,
    check_runnable,
    check_shares,
    check_world,
    is_runnable,
)
from plait.plan.fit import check_config, check_fixed_order, check_messages
from plait.run.plan_keys import check_plan_keys
from plait.run.preflight import check_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.cluster import Cluster
    from plait.config import Config
    from plait.predict.cost.campaign import KeepingRates, MeasuredCosts

ALL = 1_000_000


def add_config(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """`CONFIG` and `--set`."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?" if optional else None,
        help="a TOML file: [model], [data], [train], [plan], [cluster]",
    )
    add_overrides(parser, "train.lr=3e-4 model.hidden_size=256")


def add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    """`--set`, with an example of keys and values."""
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"override a key of the config: --set {example}",
    )


def add_steps(parser: argparse.ArgumentParser) -> None:
    """`--steps`."""
    parser.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help="train until this many steps are done (default: train.steps)",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare `--cluster`."""
    parser.add_argument(
        "--cluster",
        type=_cluster_name,
        metavar="NAME|FILE|local",
        help="a preset and a count such as h100x64, a file, or local (default: the config's, else "
        "local); two kinds of device: h100x8+a100-80gbx8",
    )


def _cluster_name(text: str) -> str:
    if not text.strip():
        raise UsageError(
            "--cluster has no name; give a preset and a count such as h100x8, a file, or local"
        )
    return text


def add_framework(parser: argparse.ArgumentParser) -> None:
    """Declare `--framework`."""
    parser.add_argument(
        "--framework",
        default="plait",
        metavar="NAME",
        help="the framework that will run the plan: plait (default), megatron-core, torchtitan, "
        "nanotron, fsdp, deepspeed, accelerate, maxtext, ...",
    )


def add_campaign(parser: argparse.ArgumentParser) -> None:
    """Declare `--tokens`, `--mtbf` and `--costs`."""
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="tokens of the whole run, such as 15e12; also predict its days, money and energy",
    )
    parser.add_argument(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="hours between two failures of one device, such as 40000; also predict the useful "
        "part of the time, and how often to save the state",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="RUN_DIR",
        help="with --mtbf: a run that measured what a snapshot, a checkpoint and a recovery cost",
    )


def costs_of(
    arguments: argparse.Namespace, cluster: str | None = None
) -> MeasuredCosts | KeepingRates | None:
    """The costs that the run of `--costs` has measured, else the probe of cluster `local`; None
    without. Errors: `ConfigError`.

    Raises:
        UsageError: `--costs` without `--mtbf`.
    """
    from plait.cluster import read_probe
    from plait.predict.cost.campaign import KeepingRates, MeasuredCosts

    if arguments.costs is None:
        is_local = cluster is not None and cluster.strip() == "local"
        probe = read_probe() if is_local and arguments.mtbf is not None else None
        return None if probe is None else KeepingRates.of_probe(probe)
    if arguments.mtbf is None:
        raise UsageError("--costs says what failures cost; say how often they come: --mtbf HOURS")
    path = arguments.costs / "summary.json"
    try:
        return MeasuredCosts.of(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no summary of a run ({error}); name a run that has ended"
        ) from None


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN_DIR`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR|latest",
        help="the folder of a run, as plait train --out names it, or latest",
    )


def run_folder(folder: Path) -> Path:
    """The folder that is meant. Errors: `ConfigError` where there is no latest run."""
    from plait.checkpoint.folder import LATEST
    from plait.run.rundir import is_word, latest_run

    return latest_run() if is_word(folder, LATEST) else folder


def read_config(arguments: argparse.Namespace, *, with_steps: bool = True) -> Config:
    """The config file with `--set`, and `--steps` where it means those of training, laid over it.
    Errors: `ConfigError`.
    """
    from plait.config import load

    if not Path(arguments.config).exists():
        from plait.explore.known import refuse_as_file

        refuse_as_file(arguments.config)
    steps = arguments.steps if with_steps else None
    overrides = [*arguments.overrides, *([] if steps is None else [f"train.steps={steps}"])]
    return load(arguments.config, overrides)


def plan_of(config: Config, text: str | None, num_ranks: int | None = None) -> Plan:
    """The plan of `planned`."""
    return planned(config, text, num_ranks)[1]


def planned(config: Config, text: str | None, num_ranks: int | None = None) -> tuple[Config, Plan]:
    """The plan that is meant: `text`, else the config's; `auto` is the best for the ranks that are
    there. The config has the recomputation of each block that was chosen with it.

    `num_ranks` is what the user asked for; in a world that has begun, its size counts.
    Errors: `PlanError`, `NotAvailable`, `WorldSizeError`, `ScheduleError` of the config's own
    schedule, all of them before any process is started.

    Raises:
        UsageError: a number of ranks below 1.
    """
    world = joined_world()
    if num_ranks is not None and num_ranks < 1:
        raise UsageError(f"--nproc is {num_ranks}; it must be 1 or more")
    num_ranks = num_ranks if world is None else world.world_size
    if world is not None:
        from plait.comm.network import listen_on

        listen_on(config.cluster.interface)
    words = config.plan.text if text is None else text
    if words.strip() == "auto":
        config, plan = choose(config, num_ranks)
    else:
        plan = Plan.parse(words)
    plan.check()
    check_runnable(plan)
    check_world(plan, plan.world_size if num_ranks is None else num_ranks)
    check_batch(plan, config.train.global_batch)
    check_shares(plan, config.plan.shares, config.train.global_batch)
    check_kept(plan, config.plan.keep_gathered)
    check_config(plan, sizes(config))
    check_makeable(plan)
    tell_unused(config, plan)
    check_code(config, plan)
    check_plan_keys(config, plan)
    check_messages(plan, config.train.messages)
    if config.train.fixed_order:
        check_fixed_order(plan)
    if config.train.restarts:
        check_restarts(plan, config.train.num_servers)
    return config, plan


def check_makeable(plan: Plan) -> None:
    """Raises `ScheduleError` for a plan whose schedule is too long to be listed."""
    from plait.parallel.pipeline.schedules import check_shape

    check_shape(plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual)


def check_writable(path: Path) -> None:
    """Make the folder of a file that is written at the end. Raises `ConfigError` where it cannot be
    written, so that this is said before the work is done.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; {WRITE_ELSEWHERE}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "its folder takes no files"
        raise ConfigError(f"cannot write {path}: {reason}; {WRITE_ELSEWHERE}")


def check_folder(path: Path) -> None:
    """Raises `ConfigError` for a folder that cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path}: {error.strerror}; {WRITE_ELSEWHERE}"
        ) from error


def choose(config: Config, num_ranks: int | None) -> tuple[Config, Plan]:
    """The planner's first choice among the plans that this version runs. An unknown machine is
    measured first, in seconds and once. Errors: `PlanError` when there is none.
    """
    from plait.cluster import Cluster

    world = joined_world()
    if world is not None:
        size = world.world_size
        text = agreed(config, lambda: _best(config, Cluster.parse(config.cluster.name), size))
    else:
        measured(config.cluster.name)
        text = _best(config, Cluster.parse(config.cluster.name), num_ranks)
    plan, remat, kept = text.split("\n")
    config = with_words(config, tuple(remat.split()))
    return with_numbers(config, kept.split()) if kept else config, Plan.parse(plan)


def chosen_together(config: Config, choose: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 chooses for a world that has begun. Collective."""
    return Plan.parse(agreed(config, lambda: str(choose())))


def agreed(config: Config, choose: Callable[[], str]) -> str:
    """The choice of rank 0 for a world that has begun: other hosts may have been measured
    otherwise. Collective.
    """
    import atexit

    from plait import comm
    from plait.mesh import Mesh
    from plait.predict.probe.saved import ensure_probe_together

    joined = joined_world()
    assert joined is not None
    world = comm.init(Mesh(dp=joined.world_size))
    atexit.register(
        world.close, together=False
    )  # the run that follows is in the same process group
    meeting = world.axis("world")
    if config.cluster.name.strip() == "local":
        ensure_probe_together(meeting)
    chosen: str = meeting.gather_objects(choose() if world.rank == 0 else "")[0]
    return chosen


def _best(config: Config, cluster: Cluster, num_ranks: int | None) -> str:
    """The first plan for so many ranks of the cluster that this version runs. A second line has the
    words of its blocks, a third the numbers of those that zero3 keeps whole.
    """
    from plait.predict import planner

    if num_ranks is not None:
        cluster = replace(cluster, num_devices=num_ranks)
    for estimate in planner.choose(config.as_dict(), cluster, top=ALL, runnable=True):
        plan = Plan.parse(str(estimate.plan))
        if is_runnable(plan) and _takes_shares(config, plan):
            kept = " ".join(str(number) for number in estimate.keep_gathered or ())
            return f"{plan}\n{' '.join(estimate.remat)}\n{kept}"
    raise PlanError(
        f"of the plans that fit on {cluster.num_devices} x {cluster.device.name} none runs in this "
        "version yet"
    )


def _takes_shares(config: Config, plan: Plan) -> bool:
    try:
        check_shares(plan, config.plan.shares, config.train.global_batch)
    except PlanError:
        return False
    return True


def measured(cluster: str | None) -> None:
    """Make sure that `local` has been measured, where it is what is asked for. Errors:
    `ConfigError`.

    Raises:
        ClusterError: a browser's tab, which cannot measure.
    """
    if cluster is not None and cluster.strip() == "local":
        if sys.platform == "emscripten":
            raise ClusterError(
                "a browser's tab cannot measure this machine; choose a preset such as h100x8, or "
                "run plait explore --cluster local"
            )
        from plait.predict.probe.saved import ensure_probe

        ensure_probe()


def ranks(plan: Plan) -> str:
    """`1 rank`, `2 ranks`."""
    return "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"


def sizes(config: Config) -> Json:
    """The numbers of the model and the data that a plan may have to divide."""
    keys = config.model.keys_for_factory()
    experts = {} if {"python", "config"} & keys.keys() else {"num_local_experts": 0}
    return {**experts, **keys, "seq_len": getattr(config.data, "seq_len", None)}
