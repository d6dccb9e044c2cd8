"""The server's and the clients' apps on Flower's own grid, in memory: secure rounds, drop-outs,
clients that are parallel.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.comm import World
from plait.config import Config
from plait.engine.build import join_world
from plait.errors import RunError
from plait.outer.federated.client_daemon import SOCKET, ClientDaemon, attend
from plait.outer.federated.secret_round import Content
from plait.outer.federated.simulation import LocalFleet, ServerData, make_server
from plait.plan import Plan
from tests.federated.test_client_daemon import samples_as_bytes
from tests.federated.test_simulation import config, rounds_on

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs plait[federated]"),
    # Threads share one list of filters: what one of them ignores may be an error in another.
    pytest.mark.filterwarnings("ignore"),
]

Run = Callable[..., list[Any]]
DROPS = 1
IN_ROUND = 2  # the client that is lost between its shares and its change, and when


class Shared(ClientDaemon):
    """A client that shares the engine of this process with others: one answers at a time."""

    lock = threading.Lock()

    def answer(self, kind: str, said: Content) -> Content:
        with self.lock:
            return super().answer(kind, said)


class Overheard:
    """Every answer of every node, as the bytes that Flower sends for it."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def __call__(self, client: int, message: Any) -> None:
        from flwr.common.serde import message_to_proto

        if message.metadata.reply_to_message_id:
            self.said.append(message_to_proto(message).SerializeToString())

    def samples_in(self, settings: Config) -> list[bytes]:
        """The samples that can be found in what was said."""
        secrets = [
            found for samples in ServerData(settings).samples for found in samples_as_bytes(samples)
        ]
        return [secret for secret in secrets if any(secret in said for said in self.said)]


def hang_up(room: Path) -> None:
    """Call and say nothing, so that whoever listens looks up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(room / SOCKET))


@contextmanager
def residents(settings: Config, world: World, rooms: Mapping[int, Path]) -> Iterator[None]:
    """Clients of this process, each at the socket in its room."""
    over = threading.Event()
    fleet = LocalFleet(settings, Plan.parse("dp1 precision:float64"), world)
    with ThreadPoolExecutor(len(rooms)) as pool:
        homes = [
            pool.submit(attend, Shared(fleet, client), world, room, over.is_set)
            for client, room in rooms.items()
        ]
        try:
            yield
        finally:
            over.set()
            for room, home in zip(rooms.values(), homes, strict=True):
                hang_up(room)
                home.result()


def federate(
    folder: Path, settings: Config, grid: Any, *, restart: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Run the server's app; the weights and the rounds that it has written."""
    from plait.outer.federated.flower import server_app
    from tests.federated.nodes import context

    (folder / "config.toml").write_text(settings.to_toml())
    server_app(folder / "config.toml", folder / "rounds.json")(
        grid, context({}, {"restart": restart})
    )
    return load_file(folder / "weights.safetensors"), json.loads(
        (folder / "rounds.json").read_text()
    )["rounds"]


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for _, value in sorted(weights.items())])


def looks_uniform(masked: Tensor) -> bool:
    """Every byte value equally often: chi-square of 255 degrees, within 8 standard deviations."""
    counts = torch.bincount(masked.view(torch.uint8).long(), minlength=256).double()
    expected = counts.sum() / 256
    return bool(abs(((counts - expected) ** 2 / expected).sum() - 255) < 8 * (2 * 255) ** 0.5)


@pytest.fixture
def rooms(tmp_path: Path) -> dict[int, Path]:
    found = {client: tmp_path / str(client) for client in range(4)}
    for room in found.values():
        room.mkdir()
    return found


def drops(number: int, client: int) -> bool:
    return (number, client) == (IN_ROUND, DROPS)


def test_secure_rounds_on_flower_give_the_plain_sum_and_bear_a_drop_out(
    rooms: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from plait.outer.federated.flower import unpack
    from tests.federated.nodes import grid_of

    over = (
        "federated.rounds=3",
        "federated.min_replies=3",
        "federated.patience_seconds=30.0",
        "model.hidden_size=64",
    )
    seen: list[Tensor] = []

    def watch(client: int, message: Any) -> None:
        head, vectors = unpack(message.content)
        if head.get("kind") == "mask" and drops(head["number"], client):
            raise ConnectionError("this client is gone")
        if "masked" in vectors:
            assert set(vectors) == {"masked"}
            seen.append(torch.from_numpy(vectors["masked"].copy()))

    world = join_world(Plan.parse("dp1"))
    try:
        settings = config(*over, "federated.secure=true")
        with residents(settings, world, rooms), grid_of(rooms, watch) as grid:
            weights, rounds = federate(tmp_path, settings, grid)
        plain, _ = rounds_on(world, config(*over), drops)
    finally:
        world.close()
    assert [tuple(done["answered"]) for done in rounds] == [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]
    assert (flat(weights) - plain).abs().max() < 1e-6
    reason = "client 1 has no answer: ConnectionError('this client is gone')"
    assert reason in capsys.readouterr().err
    assert len(seen) == 11 and all(looks_uniform(masked) for masked in seen)
    assert not looks_uniform(
        torch.stack(seen[:4]).sum(dim=0).clamp(-(2**40), 2**40)
    )  # the test can tell a sum from a mask


@pytest.mark.parametrize("strategy", ["fedavgm", "scaffold"])
def test_an_interrupted_server_goes_on_and_begins_again_when_asked(
    rooms: dict[int, Path], tmp_path: Path, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The clients have trained the third round, and the server dies before it hears of that."""
    from plait.outer.federated.flower import unpack
    from tests.federated.nodes import grid_of

    settings = config(
        "federated.rounds=4", "federated.fraction=0.5", f"federated.strategy={strategy}"
    )
    lost: set[int] = set()
    asked: dict[int, int] = {}

    def watch(client: int, message: Any) -> None:
        head, vectors = unpack(message.content)
        if head.get("kind") == "train":
            asked[client] = head["number"]
        elif "change" in vectors and asked[client] == 3 and client not in lost:
            lost.add(client)
            raise ConnectionError("the server is gone")

    world = join_world(Plan.parse("dp1"))
    try:
        alone, _ = rounds_on(world, settings)
        with residents(settings, world, rooms), grid_of(rooms, watch) as grid:
            with pytest.raises(RunError, match="round 3: 0 of 2 clients answered"):
                federate(tmp_path, settings, grid)
            resumed, rounds = federate(tmp_path, settings, grid)
            (tmp_path / "weights.safetensors").unlink()
            (tmp_path / "rounds.json").unlink()
            written, _ = federate(tmp_path, settings, grid)
            again, _ = federate(tmp_path, settings, grid, restart=True)
    finally:
        world.close()
    assert (
        "state has 2 of 4 rounds; call begin.sh with --restart to begin again"
        in capfd.readouterr().out
    )
    assert [done["round"] for done in rounds] == [1, 2, 3, 4]
    assert torch.equal(flat(resumed), alone)
    assert torch.equal(flat(written), alone)
    assert torch.equal(flat(again), alone)


def test_an_interruption_after_a_restart_does_not_lead_back(
    rooms: dict[int, Path], tmp_path: Path
) -> None:
    from plait.outer.federated.flower import unpack
    from tests.federated.nodes import grid_of

    settings = config("federated.rounds=1")
    is_gone: list[bool] = []

    def watch(client: int, message: Any) -> None:
        if is_gone and unpack(message.content)[0].get("kind") == "train":
            raise ConnectionError("the server is gone")

    world = join_world(Plan.parse("dp1"))
    try:
        with residents(settings, world, rooms), grid_of(rooms, watch) as grid:
            federate(tmp_path, settings, grid)
            state = tmp_path / "weights.safetensors.state"
            assert state.exists()
            is_gone.append(True)
            with pytest.raises(RunError):
                federate(tmp_path, settings, grid, restart=True)
            assert not state.exists()
    finally:
        world.close()


def test_a_rule_in_flowers_own_loop_gives_what_it_gives_in_ours(rooms: dict[int, Path]) -> None:
    from plait.outer.federated.flower_strategy import FlowerStrategy, from_arrays, to_arrays
    from tests.federated.nodes import grid_of

    settings = config("federated.rounds=2", "federated.strategy=scaffold")
    heard = Overheard()
    world = join_world(Plan.parse("dp1"))
    try:
        ours, rounds = rounds_on(world, settings)
        with residents(settings, world, rooms), grid_of(rooms, heard) as grid:
            server = make_server(settings, ServerData(settings).evaluator.initial())
            result = FlowerStrategy(server.strategy).start(
                grid, to_arrays(server.weights), num_rounds=2
            )
    finally:
        world.close()
    assert torch.equal(from_arrays(result.arrays), ours)
    told = [result.evaluate_metrics_clientapp[done.number]["worst"] for done in rounds]
    assert told == [min(done.client_accuracy.values()) for done in rounds]
    assert not heard.samples_in(settings) and len(heard.said) == 2 * 2 * len(rooms)
    heard.said.append(samples_as_bytes(ServerData(settings).samples[0])[0])
    assert heard.samples_in(settings)  # the search finds a sample that does leave


def parallel(world: World, settings: Config, plan: str, client: int, room: str) -> None:
    """The ranks of one client, until there is a file `over`."""
    resident = ClientDaemon(LocalFleet(settings, Plan.parse(plan), world), client)
    attend(resident, world, Path(room), until=(Path(room) / "over").exists)


@pytest.mark.parametrize("plan", ["dp2", "tp2"])
def test_a_client_behind_flower_may_be_parallel(
    ranks: Run, plan: str, rooms: dict[int, Path], tmp_path: Path
) -> None:
    from tests.federated.nodes import grid_of

    settings = config(
        "federated.rounds=2",
        "federated.min_replies=4",
        "federated.strategy=scaffold",
        "model.num_hidden_layers=2",
    )
    world = join_world(Plan.parse("dp1"))
    others = {client: room for client, room in rooms.items() if client}
    try:
        with (
            ThreadPoolExecutor(1) as pool,
            residents(settings, world, others),
            grid_of(rooms) as grid,
        ):
            words = settings, f"{plan} precision:float64", 0, str(rooms[0])
            client = pool.submit(ranks, 2, parallel, *words, plan=plan)
            weights, rounds = federate(tmp_path, settings, grid)
            (rooms[0] / "over").touch()
            hang_up(rooms[0])
            client.result()
        alone, _ = rounds_on(world, settings)
    finally:
        world.close()
    assert [done["answered"] for done in rounds] == [[0, 1, 2, 3]] * 2
    assert (flat(weights) - alone).abs().max() <= 1e-10 * alone.abs().max()
