"""Snapshots of a run under torchrun: they outlive its ranks in the memory of their machine.

torchrun ends all ranks when one is lost, and starts them again. A process of its own holds the
files of a machine's ranks meanwhile (`plait.launcher.host_memory`). With several machines each part
is sent to a rank of the next one. So a machine may be lost with its memory. Ranks of a new
start say what their machines hold, and go on from the newest snapshot that is whole.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.checkpoint.memory import MemoryCopy
from plait.comm.calls import Address, CallMessage, Connection, Service
from plait.comm.network import LOOPBACK, on_one_machine, own_host
from plait.comm.shm.snapshot_head import NOTHING, step_of
from plait.doctor.findings import say
from plait.errors import RankFailed
from plait.launcher.board import Waited
from plait.launcher.host_memory import HostMemory, of_this_agent
from plait.launcher.snapshot_files import FILES_A_RANK
from plait.run.copier import Copier
from plait.run.costs import WaitedFor
from plait.run.held_parts import (
    FETCHED,
    OWN,
    REPLICA,
    HeldPart,
    HeldSnapshot,
    PartName,
    have_room,
    newest,
    next_start,
    partner_of,
)
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.memory import free_memory_bytes
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.comm import World
    from plait.engine.engine import Engine

KEEP, SEND = range(2)
"""The kinds of questions to another rank: to keep a replica, and to send a file."""


@dataclass(frozen=True)
class _Word:
    """The word of a rank at a start."""

    host: str
    address: str
    token: str
    checkpoint_step: int
    held: tuple[HeldPart, ...]
    starts: tuple[str, ...]


class HostSnapshots(Hook):
    """Takes snapshots every `every` steps, and goes on from those of an earlier start. For all
    ranks of a run that torchrun has started.

    A run that goes back to them (`goes_back`) has one before its first step. It waits for each, so
    that what a step does to its weights is in none.

    Attributes:
        source: what the run went on from: `snapshot`, `replica`, or empty for none of these.
    """

    def __init__(
        self,
        world: World,
        memory: HostMemory,
        every: int,
        checkpoint_step: int,
        *,
        goes_back: bool = False,
    ) -> None:
        self.source = ""
        self._goes_back = goes_back
        self._world = world
        self._memory = memory
        self._every = every
        self._copier = Copier()
        self._waited = WaitedFor(Waited.SNAPSHOTS)
        self._copying = WaitedFor(Waited.COPYING)
        self._replica_bytes = 0
        self._replicas: dict[tuple[int, int], MemoryCopy] = {}
        self._service = Service(self._answer, _forget, _address())
        self._words = self._exchanged(checkpoint_step)
        self._hosts = [word.host for word in self._words]
        held = [part for word in self._words for part in word.held]
        self._found = newest(held)
        starts = [start for word in self._words for start in word.starts]
        self._start = next_start(starts, self._words[0].token)
        self._partner: Connection | None = None
        self._engine: Engine

    # -- the start of a run
    # ------------------------------------------------------------------------------------------

    def restore(self, engine: Engine) -> JsonObject | None:
        """Fill the engine from the newest snapshot; its meta data. None where there is none, or a
        checkpoint is newer. Collective.
        """
        from plait.engine.state.snapshots import restore

        found = self._found
        if found is None or found.step < self._words[0].checkpoint_step:
            self._found = None
            return None
        self._fetch(found)
        self._world.axis("world").barrier()
        meta = restore(engine, self._paths(found))
        self.source = found.source
        return meta

    def on_start(self, start: RunStart) -> None:
        """Make the files of this start, and drop those that are not continued from."""
        from plait.engine.state.snapshots import Snapshots

        self._engine = start.engine
        self._loader = start.loader
        self._world.axis("world").barrier()  # no rank reads what is dropped
        if self._is_first_here:
            self._let_go(None if self._found is None else self._found.start)
        self._world.axis("world").barrier()
        paths = self._made(self._world.rank, OWN)
        for rank in range(self._world.size):
            if partner_of(rank, self._hosts) == self._world.rank:
                for turn, path in enumerate(self._made(rank, REPLICA)):
                    self._replicas[rank, turn] = MemoryCopy(path)
        self._snapshots = Snapshots(paths, start.engine)
        self._world.axis("world").barrier()  # everybody can keep replicas
        self._connect()
        if self._goes_back:
            self._take(start.first_step - 1)

    def newest_here(self) -> tuple[Path, ...]:
        """By rank, files on this machine of the newest snapshot of this start. Collective.

        Ranks of other machines send what is missing; `forget_fetched` drops it. Empty where there
        is no snapshot, or a machine has no memory for it, or does not answer.
        """
        held = self._held_here() if self._is_first_here else []
        told = self._world.axis("world").gather_objects((held, free_memory_bytes()))
        parts = [part for parts, _ in told for part in parts if part.name.start == self._start]
        found = newest(parts)
        if found is None or not have_room(found, self._hosts, [free for _, free in told]):
            return ()
        has_all = True
        try:
            self._fetch(found)
        except RankFailed as error:
            has_all = False
            say(f"rank {self._world.rank} cannot have the snapshot of another machine: {error}")
        return self._paths(found) if all(self._told(has_all)) else ()

    def forget_fetched(self) -> None:
        """Drop what other machines have sent. Collective."""
        self._world.axis("world").barrier()  # every rank has read it
        if self._is_first_here:
            names = [name for name in self._memory.ask() if PartName.of_text(name).kind == FETCHED]
            self._memory.ask(drop=names)

    def _told(self, word: bool) -> list[bool]:
        told: list[bool] = self._world.axis("world").gather_objects(word)
        return told

    def _held_here(self) -> list[HeldPart]:
        """The whole parts that this machine holds."""
        parts = []
        for name, path in self._memory.ask().items():
            step = step_of(path)
            if step != NOTHING:
                part = PartName.of_text(name)
                parts.append(HeldPart(part, step, path.stat().st_size, self._world.rank))
        return parts

    def _exchanged(self, checkpoint_step: int) -> list[_Word]:
        """The words of all ranks. The first of a machine tells what that holds. Collective."""
        hosts = self._world.axis("world").gather_objects(self._memory.host)
        self._local = [rank for rank, host in enumerate(hosts) if host == self._memory.host]
        files = self._memory.ask() if self._is_first_here else {}
        parts = self._held_here() if self._is_first_here else []
        word = _Word(
            self._memory.host,
            self._service.address.as_text(),
            secrets.token_hex(4),
            checkpoint_step,
            tuple(parts),
            tuple({PartName.of_text(name).start for name in files}),
        )
        words: list[_Word] = self._world.axis("world").gather_objects(word)
        return words

    @property
    def _is_first_here(self) -> bool:
        return self._world.rank == self._local[0]

    def _connect(self) -> None:
        """Reach the rank that keeps the replicas. Without it the run has none, and says so."""
        partner = partner_of(self._world.rank, self._hosts)
        if partner is None:
            return
        try:
            self._partner = self._connected(partner)
        except RankFailed as error:
            say(f"rank {self._world.rank} has no replica on another machine: {error}")

    def _connected(self, rank: int) -> Connection:
        address = Address.of_text(self._words[rank].address)
        return Connection(address, self._world.rank)

    def _fetch(self, found: HeldSnapshot) -> None:
        """Have the parts that this machine lacks, each by one of its ranks."""
        missing = found.missing(self._memory.host, self._hosts)
        turn = self._local.index(self._world.rank)
        for copies in missing[turn :: len(self._local)]:
            part = min(copies, key=lambda one: one.name.kind != OWN)
            name = PartName(found.start, len(found.parts), part.name.rank, 0, FETCHED).as_text()
            MemoryCopy(self._memory.ask(make=[name])[name]).write(self._sent(part))

    def _sent(self, part: HeldPart) -> Tensor:
        """The bytes of a part that another machine holds.

        They come by the connection to the rank that keeps this one's replicas, where that holds
        them: a second one would end the first.
        """
        name = torch.tensor([*part.name.as_text().encode()], dtype=torch.uint8)
        content = torch.empty(part.num_bytes, dtype=torch.uint8)
        known = self._partner
        if part.holder != partner_of(self._world.rank, self._hosts):
            known = None
        line = known or self._connected(part.holder)
        try:
            line.ask(CallMessage(SEND, data=name))
            line.answer(into=content)
        finally:
            if line is not known:
                line.close()
        return content

    def _paths(self, found: HeldSnapshot) -> tuple[Path, ...]:
        """By rank of the start that wrote it, the files of a snapshot on this machine."""
        files = self._memory.ask()
        paths = []
        for rank in range(len(found.parts)):
            names = map(PartName.of_text, files)
            of_rank = [one for one in names if (one.start, one.rank) == (found.start, rank)]
            here = [files[one.as_text()] for one in of_rank]
            paths.append(next(path for path in here if step_of(path) == found.step))
        return tuple(paths)

    def _made(self, rank: int, kind: str) -> list[Path]:
        """The files of this start for the parts of a rank."""
        turns = range(FILES_A_RANK)
        parts = [PartName(self._start, self._world.size, rank, turn, kind) for turn in turns]
        names = [part.as_text() for part in parts]
        files = self._memory.ask(make=names)
        return [files[name] for name in names]

    def _let_go(self, kept: str | None) -> None:
        """Drop what earlier starts have left, but for this rank's copies of one of them."""
        names = [*map(PartName.of_text, self._memory.ask())]
        dropped = [
            name.as_text()
            for name in names
            if name.start != self._start and (name.start != kept or name.kind == FETCHED)
        ]
        self._memory.ask(drop=dropped)

    # -- steps
    # ------------------------------------------------------------------------------------------

    def needs_state(self, step: int) -> bool:
        return step % self._every == 0

    def on_step(self, done: StepDone) -> None:
        """Keep the state of the step."""
        if done.step % self._every == 0:
            self._take(done.step)

    def before_rollback(self) -> None:
        """The newest snapshot is whole."""
        self._wait_for_copy()

    def on_end(self) -> None:
        """The last snapshot is whole."""
        self._wait_for_copy()

    def close(self) -> None:
        """Hang up; what waits for another rank ends."""
        if self._partner is not None:
            self._partner.close()
        self._service.close()
        self._copier.close()

    def numbers(self) -> JsonObject:
        """The cost of the snapshots since the last start, as a rank has it."""
        cost = {
            "count": self._waited.count,
            "seconds": self._waited.seconds,
            "processor_seconds": self._copying.seconds,
            "bytes": self._snapshots.num_bytes,
            "replica_bytes": self._replica_bytes,
        }
        return {"snapshots": cost}

    def _take(self, step: int) -> None:
        """Copy the state beside the next step, until that sums its gradients."""
        self._wait_for_copy()
        if self._waited.count == 1 and self._is_first_here:
            self._let_go(None)  # the first snapshot of this start is whole on every rank
        began = time.perf_counter()
        turn = step // self._every % FILES_A_RANK
        copy = self._snapshots.begin(turn, {"loader": self._loader.state_dict()})
        self._copier.begin(partial(self._copy_and_send, copy, turn))
        self._waited.add(time.perf_counter() - began)
        if self._goes_back:
            self._wait_for_copy()
        else:
            self._engine.copies.add(self._wait_for_copy)

    def _copy_and_send(self, copy: Callable[[], None], turn: int) -> None:
        """Copy the state into this machine's memory, then into another's. In a thread."""
        copy()
        if self._partner is None:
            return
        content = self._snapshots.content(turn)
        self._partner.ask(CallMessage(KEEP, (turn,), content))
        self._partner.answer()
        self._replica_bytes += content.numel()

    def _wait_for_copy(self) -> None:
        """Wait until the snapshot is whole, on both machines."""
        began = time.perf_counter()
        self._copying.add(self._copier.wait())
        self._waited.add(time.perf_counter() - began, count=0)

    def _answer(self, caller: int, question: CallMessage) -> CallMessage:
        """Keep the replica of a caller's part, or send a file that this machine holds."""
        assert question.data is not None
        if question.kind == KEEP:
            self._replicas[caller, int(question.numbers[0])].write(question.data)
            return CallMessage(KEEP)
        path = self._memory.ask()[bytes(question.data.tolist()).decode()]
        size = path.stat().st_size
        return CallMessage(SEND, data=torch.from_file(str(path), size=size, dtype=torch.uint8))


def host_snapshots(
    world: World, every: int, checkpoint_step: Callable[[], int], *, goes_back: bool = False
) -> HostSnapshots | None:
    """The snapshots of a run in a world of torchrun; None where machines have no such memory.

    Collective.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    memory = of_this_agent(begins=os.environ.get("LOCAL_RANK") == "0")
    told: Sequence[bool] = world.axis("world").gather_objects(memory is not None)
    if memory is None or not all(told):
        return None
    return HostSnapshots(world, memory, every, checkpoint_step(), goes_back=goes_back)


def _address() -> str:
    """The address at which other ranks reach this one."""
    try:
        return own_host(on_one_machine(os.environ))
    except OSError:  # the machine's name leads nowhere; the caller will say so
        return LOOPBACK


def _forget(caller: int) -> None:
    """A rank whose connection ends has left nothing to undo."""
