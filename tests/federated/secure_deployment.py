"""A secure federation deployed on loopback, run by hand: one client is two ranks, one is killed
outright and comes back.

    python -m tests.federated.secure_deployment [--back]

It takes minutes: Flower starts a process for each of a round's four questions to each client, and
lets a node that was killed in again after up to a minute. So the suite runs the same apps on a grid
in memory (`test_flower`). The weights that the server has at last are compared with those of a
plain simulation of the same rounds, with the clients that answered. `--back` waits for the killed
one to be in again.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from plait.config import Config, load
from plait.engine.build import join_world
from plait.outer.federated import deploy
from plait.outer.federated.simulation import LocalFleet, make_server
from plait.plan import Plan
from tests.federated.machines import Machines
from tests.federated.test_deployment import CONFIG, free_port, listens, rounds

OVERRIDES = ["model.num_hidden_layers=2", "federated.secure=true"]
PARALLEL = 1
KILLED = 2  # clients
EVERYBODY = (0, 1, 2)
OTHERS = (0, 1)


def written_weights(folder: Path) -> tuple[int, Tensor]:
    """(the round that they are of, the weights end to end)."""
    with safe_open(folder / "weights.safetensors", "pt") as file:
        parts = [file.get_tensor(name).reshape(-1) for name in sorted(file.keys())]
        return int(file.metadata()["round"]), torch.cat(parts)


def plain(settings: Config, answered: list[tuple[int, ...]]) -> Tensor:
    """The weights after rounds of those that answered, summed in the open."""
    world = join_world(Plan.parse("dp1"))
    fleet = LocalFleet(
        settings,
        Plan.parse("dp1"),
        world,
        lambda number, client: client not in answered[number - 1],
    )
    server = make_server(settings, fleet.initial())
    for number in range(1, len(answered) + 1):
        server.round(fleet, number)
    world.close()
    return server.weights


def main() -> None:
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that the processes are taken down
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port(3)
        settings = load(CONFIG, OVERRIDES)
        written = deploy.write(settings, folder / "d", "127.0.0.1", port)
        own = folder / "d" / f"client-{PARALLEL}" / "config.toml"
        own.write_text(own.read_text().replace('text = "dp1"', 'text = "tp2"'))
        machines = Machines(folder)
        try:
            machines.start("server", written["server"])
            machines.until(lambda: listens(port), "server")
            registered = machines.start("register", written["register"])
            machines.until(lambda: registered.poll() is not None, "server")
            for number, script in enumerate(written["clients"]):
                machines.start(f"client {number}", script)
            machines.start("begin", written["begin"])
            machines.until(lambda: EVERYBODY in rounds(written), "server", "begin")
            print("all three are in", rounds(written), flush=True)
            machines.kill(f"client {KILLED}")
            before = len(rounds(written))
            machines.until(lambda: OTHERS in rounds(written)[before:], "server", "begin")
            print("one is killed, the others go on", rounds(written), flush=True)
            if "--back" in sys.argv:
                machines.start(f"client {KILLED}", written["clients"][KILLED])
                machines.until(lambda: EVERYBODY in rounds(written)[before:], "server", "begin")
                print("it is back", rounds(written), flush=True)
            number, weights = written_weights(folder / "d" / "server")
            machines.until(lambda: len(rounds(written)) >= number, "server")
            answered = rounds(written)[:number]
        finally:
            machines.close()
    settings = load(CONFIG, [word for word in OVERRIDES if "secure" not in word])
    difference = float((weights - plain(settings, answered)).abs().max())
    print(
        f"{number} rounds, answered by {answered}: the weights differ from the plain sum's by "
        f"{difference:.1e}"
    )
    assert difference < 1e-6


if __name__ == "__main__":
    main()
