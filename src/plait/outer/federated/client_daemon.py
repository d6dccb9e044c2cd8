"""The client daemon: its engine and data live in one process, or in the ranks of its plan.

They stay there, whatever carries the messages.

Flower starts a process for every message. Such a process need not load torch, build an engine and
read the data again. It hands the message to the daemon over a local socket (see `wire`) and hands
the answer back. The daemon also keeps state that outlives a message. SCAFFOLD's control is on disk,
and the secrets of a round of secure aggregation are in memory only.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from plait.comm import World
from plait.config import Config
from plait.engine.build import join_world
from plait.errors import PlaitError, RunError
from plait.outer.federated import wire
from plait.outer.federated.kept_rounds import KeptRounds
from plait.outer.federated.messages import TrainTask, check_reply
from plait.outer.federated.secret_round import PHASES, Content
from plait.outer.federated.simulation import LocalFleet
from plait.plan import Plan

T = TypeVar("T")
SOCKET = "resident"
PING_SECONDS = 5.0
LOOK_SECONDS = 0.2
LINE_SECONDS = 60.0


class ClientDaemon:
    """One client of a federation, whose answers are all that others get."""

    def __init__(
        self, fleet: LocalFleet, client: int, kept: Path | None = None, *, keeps: bool = True
    ) -> None:
        self._fleet = fleet
        self._samples = fleet.samples[client]
        self._keeps = keeps
        self._rounds = KeptRounds(self._samples, kept)

    def answer(self, kind: str, content: Content) -> Content:
        """The answer of this client to a question. Raises `PlaitError` for one that fails.

        Collective.
        """
        client, (head, vectors) = self._samples.client, content
        if kind == "evaluate":
            return {
                "client": client,
                "accuracy": self._fleet.evaluator.accuracy(vectors["weights"], self._samples.test),
            }, {}
        if kind in PHASES:
            return _only(self._fleet.secret(kind, {client: content}).values())
        if kind != "train":
            raise PlaitError(
                f"a client is asked to '{kind}'; it trains, evaluates and sums in secret"
            )
        extra = {name: vector for name, vector in vectors.items() if name != "weights"}
        task = TrainTask(int(head["number"]), vectors["weights"], extra)
        with self._rounds.around(head.get("federation", ""), task.number, keeps=self._keeps):
            reply = _only(self._fleet.train(task, [client]))
            check_reply(reply, vectors["weights"].numel())
        told = {
            "client": client,
            "num_examples": reply.num_examples,
            "metrics": dict(reply.metrics),
        }
        return told, {"change": reply.change, **reply.extra}


def _only(answers: Iterable[T]) -> T:
    for answer in answers:
        return answer
    raise RunError("its training failed, so it has nothing to send")


def serve(config: Config, client: int, room: str, kept: str) -> None:
    """Answer at the socket `room`/resident, until the process ends. Every rank of the client's plan
    calls it.
    """
    plan = Plan.parse(config.plan.text)
    world = join_world(plan, backend=config.cluster.backend)
    attend(
        ClientDaemon(LocalFleet(config, plan, world), client, Path(kept), keeps=world.rank == 0),
        world,
        Path(room),
    )


def attend(
    daemon: ClientDaemon, world: World, room: Path, until: Callable[[], bool] = lambda: False
) -> None:
    """Answer questions at the socket in `room`, until rank 0 finds `until` true. Collective."""
    axis = world.axis("world")
    listener = _listen(room / SOCKET) if world.rank == 0 else None
    over = False
    while not over:
        line, asked = _next(listener)
        over = listener is not None and until()
        if (
            axis.size > 1
        ):  # also without a question, so that no rank waits for longer than its backend bears
            asked, over = axis.gather_objects((asked, over))[0]
        if asked is None:
            continue
        head, vectors = asked
        try:
            answer, sent = daemon.answer(
                head.pop("kind"),
                (head, {n: torch.from_numpy(v.copy()) for n, v in vectors.items()}),
            )
        except PlaitError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            sent = {}
        if line is not None:
            with line, suppress(OSError):  # the asker may be gone: its answer is dropped
                wire.send(line, answer, {name: vector.numpy() for name, vector in sent.items()})
    if listener is not None:
        listener.close()


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    listener.settimeout(PING_SECONDS)
    print(f"plait: a client is ready at {path}", file=sys.stderr, flush=True)
    return listener


def _next(
    listener: socket.socket | None,
) -> tuple[socket.socket | None, tuple[wire.Head, wire.Vectors] | None]:
    """The next question and its connection. Neither when none came for a while, or on ranks that
    do not listen.
    """
    if listener is None:
        return None, None
    try:
        line, _ = listener.accept()
    except TimeoutError:
        return None, None
    line.settimeout(LINE_SECONDS)
    try:
        return line, wire.receive(line)
    except (OSError, ValueError):
        line.close()
        return None, None


def end_with_parent(room: Path) -> None:
    """End this process, as if interrupted, when the one that started it is gone; and take the
    socket's folder away.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        shutil.rmtree(room, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
