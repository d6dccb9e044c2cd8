"""`plait federated`: train over clients that keep their data; simulated here, or written out for a
real deployment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.parser import UsageError
from plait.cli.recomputation import with_remat
from plait.errors import ConfigError, PlanError
from plait.jobs.job import counted
from plait.launcher import joined_world, launch
from plait.launcher.main_process import is_main_process, say
from plait.plan import shares_text

if TYPE_CHECKING:
    from plait.config import Config

SHOWN = 8  # missing clients that a line names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait federated`."""
    common.add_config(parser)
    parser.add_argument(
        "--rounds", type=int, metavar="K", help="rounds (default: federated.rounds of the config)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the numbers there after each round, as JSON",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="write the newest weights there after each round, as safetensors",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on after the last round of a simulation that was interrupted, from the state "
        "that is beside its --weights FILE",
    )
    parser.add_argument(
        "--deploy",
        type=Path,
        metavar="DIR",
        help="write there what Flower needs for several machines: app, certificates, commands",
    )
    parser.add_argument(
        "--serve",
        type=Path,
        metavar="ROOM",
        help="act as one client in this folder; the scripts of --deploy call it",
    )
    parser.add_argument(
        "--client", type=int, metavar="N", help="with --serve: which client (default: 0)"
    )
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="FILE",
        help="with --serve: the file of what the client keeps between rounds",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="with --deploy: the name or address of the server"
    )
    parser.add_argument(
        "--port", type=int, default=9092, help="with --deploy: the port of the server"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Simulate, or write the deployment. Errors: those of the config, the plan and the rounds.

    Raises:
        UsageError: `--client` without `--serve`, `--resume` without `--weights`, or no round.
        PlanError: a plan with shares.
    """
    from plait.config import load
    from plait.outer.federated.local_rules import check_local_training

    if arguments.client is not None and arguments.serve is None:
        raise UsageError(
            f"--client {arguments.client} says which client --serve is to be; leave it out to "
            "simulate all clients"
        )
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UsageError(f"--rounds is {arguments.rounds}; a federation has one round or more")
    overrides = [
        *arguments.overrides,
        *([] if arguments.rounds is None else [f"federated.rounds={arguments.rounds}"]),
    ]
    if arguments.resume and (arguments.weights is None or arguments.deploy or arguments.serve):
        raise UsageError(
            "--resume goes on with a simulation from the state beside its --weights FILE; give that"
            " FILE, without --deploy and --serve"
        )
    config = load(arguments.config, overrides)
    check_local_training(config)
    plan = common.plan_of(config, None)
    config = with_remat(config, plan)
    if config.plan.shares:
        raise PlanError(
            f"plan.shares {shares_text(config.plan.shares)}: the ranks of a client share its "
            "samples alike; leave shares out"
        )
    if arguments.serve is not None:
        return be_client(config, arguments, plan.world_size)
    if arguments.deploy is not None:
        from rich.text import Text

        from plait.outer.federated.deploy import write

        common.check_folder(arguments.deploy)

        written = write(config, arguments.deploy, arguments.host, arguments.port)
        return Answer(written, Text(written["text"], no_wrap=True, overflow="ignore"))
    for path in (arguments.out, arguments.weights):
        if path is not None and is_main_process():
            common.check_writable(path)
    section = config.federated
    say(
        f"plait federated: {section.strategy}, {counted(section.clients, 'client')} "
        f"({section.partition}), {counted(section.rounds, 'round')}, each client {plan}"
    )
    out: Path | None = arguments.out
    is_device = out is not None and out.exists() and not out.is_file()
    kept = None if out is None or is_device else out.resolve()
    weights: Path | None = arguments.weights and arguments.weights.resolve()
    result = launch(simulated, config, kept, weights, arguments.resume, nproc=plan.world_size)[0]
    if out is not None and is_device and is_main_process():
        out.write_text(json.dumps(result, indent=2) + "\n")
    return Answer(result, view(result)) if is_main_process() else Answer(None)


def be_client(config: Config, arguments: argparse.Namespace, num_ranks: int) -> Answer:
    """Answer for one client until the process that started this one is gone.

    Raises:
        ConfigError: the config has no such client.
    """
    from plait.outer.federated.client_daemon import end_with_parent, serve

    end_with_parent(arguments.serve)
    client = arguments.client or 0
    if not 0 <= client < config.federated.clients:
        raise ConfigError(
            f"--client {client}: the config has clients 0 to {config.federated.clients - 1}"
        )
    words = (
        config,
        client,
        str(arguments.serve),
        str(arguments.kept or arguments.serve / "kept.safetensors"),
    )
    if num_ranks == 1:
        serve(*words)
    launch(serve, *words, nproc=num_ranks)
    return Answer(None)


def simulated(config: Config, out: Path | None, weights: Path | None, resume: bool) -> Json:
    """The entry of every rank of a client's plan."""
    from plait.outer.federated.simulation import simulate

    return simulate(config, show, out=out, weights=weights, resume=resume)


def show(done: Any) -> None:
    """One line a round, on stderr."""
    world = joined_world()
    if world is None or world.rank == 0:
        record = done.as_dict()
        absent = sorted({*record["asked"]} - {*record["answered"]})
        missing = len(absent)
        judged = record["client_accuracy"]
        spread = (
            f"clients {record['client_accuracy_worst']:.3f} to {max(judged.values()):.3f}  "
            if judged
            else ""
        )
        loss = record["train_loss"]
        accuracy = record["accuracy"]
        line = (
            f"round {record['round']}  "
            + ("" if loss is None else f"loss {loss:.4g}  ")
            + ("" if accuracy is None else f"accuracy {accuracy:.3f}  ")
            + f"{spread}"
            f"{record['sent_bytes'] / 1e6:.2f} MB out, {record['received_bytes'] / 1e6:.2f} MB in"
        )
        line += f"  {missing} missing ({some(absent)})" if missing else ""
        line += f"  epsilon {record['epsilon']:.2f}" if record["epsilon"] is not None else ""
        print(line, file=sys.stderr, flush=True)


def some(clients: Sequence[int]) -> str:
    """The first numbers of clients, for a line."""
    shown = ", ".join(map(str, clients[:SHOWN]))
    return f"{shown}, ..." if len(clients) > SHOWN else shown


def view(result: Json) -> str:
    """The numbers for people."""
    accuracy = result["accuracy"]
    worst = result["client_accuracy_worst"]
    judged = [
        "accuracy      none: the server holds out no targets that are numbers of classes"
        if accuracy is None
        else f"accuracy      {accuracy:.4f} on samples that the server holds out"
    ]
    if worst is not None:
        judged.append(f"worst client  {worst:.4f} on samples of its own")
    lines = [
        f"rounds        {len(result['rounds'])}",
        *judged,
        f"traffic       {result['sent_bytes'] / 1e6:.2f} MB to clients, "
        f"{result['received_bytes'] / 1e6:.2f} MB from them",
    ]
    if result["epsilon"] is not None:
        lines.append(f"privacy       epsilon {result['epsilon']:.2f}")
    return "\n".join(lines)
