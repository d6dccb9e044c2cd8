"""Everything that a client ever says, read byte by byte; a client that is itself parallel; and what
outlives its process.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from plait.comm import World
from plait.errors import RunError
from plait.outer.federated import wire
from plait.outer.federated.client_daemon import ClientDaemon
from plait.outer.federated.kept_rounds import KeptRounds
from plait.outer.federated.messages import Reply
from plait.outer.federated.samples import ClientState, Samples, Subset
from plait.outer.federated.secret_round import Content
from plait.outer.federated.simulation import LocalFleet, make_server
from plait.plan import Plan
from tests.federated.test_simulation import config

if TYPE_CHECKING:
    from plait.datasets.sample_set import SampleSet

Run = Callable[..., list[Any]]
FIELDS = {
    "train": {"client", "num_examples", "metrics"},
    "evaluate": {"client", "accuracy"},
    "advertise": {"client", "keys"},
    "share": {"client", "sealed"},
    "mask": {"client", "metrics"},
    "unmask": {"client", "seeds", "keys"},
}
VECTORS = {"train": {"change"}, "mask": {"masked"}}


class Overheard:
    """Residents as a server's clients, each answer as the bytes that leave the client."""

    def __init__(self, settings: Any, world: World) -> None:
        self.fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
        self.residents = {
            samples.client: ClientDaemon(self.fleet, samples.client)
            for samples in self.fleet.samples
        }
        self.num_clients = self.fleet.num_clients
        self.content: list[tuple[str, int, bytes]] = []
        self.accuracy = self.fleet.accuracy

    def _ask(self, kind: str, contents: Mapping[int, Content]) -> dict[int, Content]:
        answers = {}
        for client, content in contents.items():
            head, vectors = self.residents[client].answer(kind, content)
            self.content.append(
                (kind, client, wire.pack(head, {name: v.numpy() for name, v in vectors.items()}))
            )
            answers[client] = head, vectors
        return answers

    def train(self, task: Any, clients: Any) -> list[Reply]:
        vectors = {"weights": task.weights, **task.extra}
        told = self._ask(
            "train", {client: ({"number": task.number}, dict(vectors)) for client in clients}
        )
        return [
            Reply(
                c,
                task.number,
                h["num_examples"],
                v["change"],
                h["metrics"],
                {k: t for k, t in v.items() if k != "change"},
            )
            for c, (h, v) in told.items()
        ]

    def secret(self, phase: str, contents: Mapping[int, Content]) -> dict[int, Content]:
        return self._ask(phase, contents)

    def accuracies(self, weights: torch.Tensor) -> dict[int, float]:
        told = self._ask(
            "evaluate", {client: ({}, {"weights": weights}) for client in self.residents}
        )
        return {client: head["accuracy"] for client, (head, _) in told.items()}


def samples_as_bytes(samples: Samples) -> list[bytes]:
    """Every way in which a client's samples would show in a message: each row in each type, and its
    labels in order.
    """
    found = []
    for part in (samples.train, samples.test):
        inputs, targets = part.batch(torch.arange(len(part)))
        for kind in (torch.float32, torch.float64, torch.int64, torch.uint8):
            found += [row.to(kind).numpy().tobytes() for row in inputs]
            found += [(row * 16).round().to(kind).numpy().tobytes() for row in inputs]
        found += [
            targets.to(kind).numpy().tobytes()
            for kind in (torch.int64, torch.int32, torch.uint8)
            if len(targets) > 8
        ]
        found += [
            json.dumps([round(value, 6) for value in row.tolist()]).encode()[1:60] for row in inputs
        ]
    return [text for text in found if len(text.strip(b"\0")) > 16]  # zeros are no secret


def overhear(world: World, overrides: list[str]) -> list[tuple[str, int, bytes]]:
    settings = config(*overrides)
    fleet = Overheard(settings, world)
    server = make_server(settings, fleet.fleet.initial())
    list(server.run(fleet))
    secrets = [found for samples in fleet.fleet.samples for found in samples_as_bytes(samples)]
    for kind, client, data in fleet.content:
        assert not any(secret in data for secret in secrets), (kind, client)
    planted = wire.pack(
        {}, {"change": fleet.fleet.samples[0].train.batch(torch.arange(1))[0][0].double().numpy()}
    )
    assert any(secret in planted for secret in secrets)  # the search finds a sample that does leave
    return fleet.content


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["federated.strategy=fedavg"], {"train", "evaluate"}),
        (["federated.strategy=scaffold"], {"train", "evaluate"}),
        (
            ["federated.secure=true", "federated.clip=1.0"],
            {"advertise", "share", "mask", "unmask", "evaluate"},
        ),
    ],
)
def test_no_message_of_a_client_holds_a_sample(
    ranks: Run, overrides: list[str], kinds: set[str]
) -> None:
    content = ranks(1, overhear, overrides)[0]
    assert {kind for kind, *_ in content} == kinds
    numel = 65 * 16 + 17 * 10
    for kind, client, data in content:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(data)
            head, vectors = wire.receive(theirs)
        assert set(head) == FIELDS[kind] and head["client"] == client
        assert set(head.get("metrics", {})) <= {"train_loss", "num_steps", "seconds"}
        extra = {"control"} if kind == "train" and "scaffold" in overrides[0] else set()
        assert set(vectors) == VECTORS.get(kind, set()) | extra
        assert all(vector.size == numel + (kind == "mask") for vector in vectors.values())


def answers(world: World, plan: str, strategy: str) -> Any:
    settings = config(
        f"federated.strategy={strategy}",
        "model.num_hidden_layers=2",
        plan=f"{plan} precision:float64",
    )
    resident = ClientDaemon(LocalFleet(settings, Plan.parse(settings.plan.text), world), 1)
    numel = 65 * 16 + 17 * 16 + 17 * 10
    weights = torch.linspace(-0.3, 0.3, numel, dtype=torch.float64)
    extra = {"control": torch.zeros_like(weights)} if strategy == "scaffold" else {}
    trained = [
        resident.answer("train", ({"number": number}, {"weights": weights, **extra}))[1]
        for number in (1, 2)
    ]
    return [content["change"] for content in trained], resident.answer(
        "evaluate", ({}, {"weights": weights})
    )[0]


@pytest.mark.parametrize("plan", ["dp2", "tp2"])
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_a_resident_may_be_parallel(ranks: Run, plan: str, strategy: str) -> None:
    (alone, judged) = ranks(1, answers, "dp1", strategy)[0]
    for changes, told in ranks(2, answers, plan, strategy, plan=plan):
        assert told == judged
        for one, other in zip(changes, alone, strict=True):
            assert (one - other).abs().max() <= 1e-10 * other.abs().max()


def control_comes_back(world: World, folder: str) -> Any:
    settings = config("federated.strategy=scaffold")
    kept = Path(folder) / "kept.safetensors"
    plan = Plan.parse(settings.plan.text)
    fleet = LocalFleet(settings, plan, world)
    weights = fleet.initial()
    ClientDaemon(fleet, 0, kept).answer(
        "train", ({"number": 1}, {"weights": weights, "control": torch.zeros_like(weights)})
    )
    again = LocalFleet(settings, plan, world)
    ClientDaemon(again, 0, kept)
    return fleet.samples[0].kept.control, again.samples[0].kept.control


def test_scaffolds_control_outlives_the_process(ranks: Run, tmp_path: Path) -> None:
    before, after = ranks(1, control_comes_back, str(tmp_path))[0]
    assert before is not None and torch.equal(before, after)


@pytest.mark.parametrize(
    ("federation", "number", "expected"), [("one", 3, 3.0), ("one", 2, 1.0), ("two", 1, None)]
)
def test_a_client_that_starts_again_repeats_a_round_from_its_beginning(
    tmp_path: Path, federation: str, number: int, expected: float | None
) -> None:
    """The control is 1 before round 2 and 3 after it; a new federation begins without one."""
    path = tmp_path / "kept.safetensors"
    nothing = Subset(cast("SampleSet", ()), ())
    samples = Samples(0, nothing, nothing)
    kept = KeptRounds(samples, path)
    for done, value in ((1, 1.0), (2, 3.0)):
        with kept.around("one", done, keeps=True):
            samples.kept = ClientState(torch.tensor([value]))
    again = Samples(0, nothing, nothing)
    with KeptRounds(again, path).around(federation, number, keeps=False):
        found = again.kept.control
    assert (None if found is None else found.item()) == expected


def strange_questions(world: World) -> None:
    fleet = LocalFleet(
        config(), Plan.parse("dp1 precision:float64"), world, lambda number, client: True
    )
    resident = ClientDaemon(fleet, 0)
    weights = fleet.initial()
    with pytest.raises(Exception, match="asked to 'samples'"):
        resident.answer("samples", ({}, {}))
    with pytest.raises(RunError, match="nothing to send"):
        resident.answer("train", ({"number": 1}, {"weights": weights}))
    with pytest.raises(RunError, match="no secrets of round 3"):
        resident.answer("unmask", ({"number": 3, "survivors": [0]}, {}))


def test_what_a_client_does_not_do_it_says(ranks: Run) -> None:
    ranks(1, strange_questions)


def test_only_vectors_of_numbers_travel() -> None:
    with pytest.raises(ValueError, match="uint8 of 1 dimensions"):
        wire.pack({}, {"change": torch.zeros(3, dtype=torch.uint8).numpy()})
    with pytest.raises(ValueError, match="2 dimensions"):
        wire.pack({}, {"change": torch.zeros(3, 3).numpy()})
    with pytest.raises(ValueError, match="JSON"):
        wire.pack({"loss": float("nan")}, {})
