"""The world of one rank: its mesh, its axes, its ledger. `init` joins or makes the process group.

Passed along explicitly; there is no global world. Axes are made at their first use, which is a
collective call. All ranks must ask for their axes in the same order.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from plait.comm.axis import Axis
from plait.comm.backends.base import Backend
from plait.comm.devices import backend_for, group_kind, own_device
from plait.comm.hosts import ranks_a_node
from plait.comm.ledger import Ledger
from plait.comm.links import Links
from plait.comm.membership import Membership, RendezvousPlace
from plait.comm.network import listen_on, on_one_machine, open_store_of_world, store_of_world
from plait.comm.rollcall import RollCall
from plait.comm.severance import Severance
from plait.comm.work import Label, Recorder, naming_failure
from plait.doctor.flight import FlightRecorder
from plait.doctor.lines import answer_signals
from plait.doctor.pulse import Pulse
from plait.errors import PlanError, RankFailed, WorldSizeError, nearest
from plait.mesh import AxisName, Mesh
from plait.mesh.groups import Groups
from plait.paths import Paths
from plait.systems import check_system
from plait.torch_internals import on_compile, whole_or_none
from plait.trace import Timeline

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
BACKENDS = ("auto", "native", "gloo", "shared")


class World:
    """One rank's view: `rank` and `size` are global, `axis(name)` gives its line of ranks.

    `measurements` is the folder of this machine's measurements, None for simulated ranks. Ranks of
    which `is_simulated` is true are threads of one process, and draw from its random numbers.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        connect: Callable[[AxisName], Backend],
        leave: Callable[[], None],
        *,
        measurements: Path | None = None,
        is_simulated: bool = False,
        membership: Membership | None = None,
    ) -> None:
        check_system()
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.measurements = measurements
        self.is_simulated = is_simulated
        self.recorder = Recorder(rank, FlightRecorder(rank, mesh.size))
        self._pulse = Pulse(lambda: self.recorder.flight, self._speaks)
        self._connect = connect
        self._leave = leave
        self._axes: dict[AxisName, Axis] = {}
        self.membership = membership
        self._closings: list[tuple[Callable[[], None], Callable[[], None]]] = []

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def ledger(self) -> Ledger:
        """The bytes that this rank sent, by axis and operation."""
        return self.recorder.ledger

    @property
    def paths(self) -> Paths:
        """Which ways this rank's operations take by the size of what is at hand."""
        return self.recorder.paths

    @property
    def timeline(self) -> Timeline:
        """Where communication is recorded; disabled until one is set."""
        return self.recorder.timeline

    def begin_timeline(self, timeline: Timeline) -> None:
        """Record what comes in a timeline."""
        self.recorder.timeline = timeline

    def axis(self, name: AxisName) -> Axis:
        """The axis (or sub-axis, or product of axes in mesh order) of that name; the first call is
        collective.

        Raises:
            PlanError: an unknown name, or a product that is not in mesh order.
        """
        if name not in self._axes:
            line = self.mesh.line(self._rank_in_mesh, name)
            text = name if isinstance(name, str) else "*".join(name)
            if list(line) != sorted(line):
                raise PlanError(
                    f"the product {text} is not in mesh order; write the outer axis first (pp, dp, "
                    "cp, tp)"
                )
            backend = None
            if len(line) > 1:
                with naming_failure(Label(text, "connect", 0, line), self.rank):
                    backend = self._connected(name)
            self._axes[name] = Axis(
                text, line, line.index(self._rank_in_mesh), backend, self.recorder
            )
        return self._axes[name]

    @property
    def worker(self) -> tuple[int, int]:
        """(id, number) of workers on the data axis, present or not; they say which samples are
        this rank's.
        """
        if self.membership is not None:
            return self.membership.worker, self.membership.num_workers
        axis = self.axis("dp")
        return axis.rank, axis.size

    @property
    def _rank_in_mesh(self) -> int:
        """This rank's place in the mesh; 0 in a mesh of one, before it has met anybody."""
        return min(self.rank, self.mesh.size - 1)

    def regroup(self, mesh: Mesh, rank: int, connect: Callable[[AxisName], Backend]) -> None:
        """Be rank `rank` of another mesh from here on. Axes that have been given out become those
        of the new one. Collective of the new mesh.
        """
        self.mesh = mesh
        self.rank = rank
        self._connect = connect
        for name, axis in self._axes.items():
            line = mesh.line(rank, name)
            axis.regroup(line, line.index(rank), self._connected(name) if len(line) > 1 else None)

    def _connected(self, name: AxisName) -> Backend:
        backend = self._connect(name)
        backend.follow(self.paths)
        return backend

    def together(self, act: Callable[[], T]) -> T:
        """Do something collective; where ranks come and go, again without those that are lost in
        it. Collective.
        """
        if self.membership is None:
            return act()
        return self.membership.together(lambda round_: act(), opens=False)

    def barrier(self) -> None:
        """Return when every rank of the world has called it."""
        self.axis("world").barrier()

    def at_close(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Have `before` called when this rank begins to close, and `after` when all ranks have."""
        self._closings.append((before, after))

    def equal_ranks(self, shares: Sequence[int] = ()) -> tuple[int, ...]:
        """The ranks that do as much of the same work, this one included.

        `shares`: of the data ranks in a batch, in their order; equal by default.
        """
        line = self.mesh.line(self._rank_in_mesh, "dp")
        if not shares:
            return tuple(line)
        own = shares[line.index(self._rank_in_mesh)]
        return tuple(rank for rank, share in zip(line, shares, strict=True) if share == own)

    def record_into(self, folder: Path, shares: Sequence[int] = ()) -> None:
        """Keep this rank's flight record in a folder from here on, and answer who asks for its
        line. Before any axis but that of the world is used.

        `shares`: as for `equals`, with which a slow rank is compared.
        """
        flight = FlightRecorder(self.rank, self.mesh.size, folder, self.equal_ranks(shares))
        self.recorder.flight = flight
        answer_signals(folder, self.rank)
        on_compile(partial(flight.compiling, 1), partial(flight.compiling, -1))

    def watch(self) -> None:
        """Have a thread say whom this rank waits for, when it does so for long."""
        self._pulse.start()

    def _speaks(self, axis: str) -> bool:
        return any(one.name == axis and one.says_waits for one in list(self._axes.values()))

    def close(self, together: bool = True) -> None:
        """Give back the axes, and destroy the process group if `init` made it. Safe to call twice.

        `together` waits for all ranks first, because a Gloo rank that leaves early breaks its
        peers' last operation. Pass False after a failure.
        """
        closings = self._closings
        self._closings = []
        if together and self._axes:
            with contextlib.suppress(RankFailed):  # a peer that is gone need not be waited for
                for before, _ in closings:
                    before()
                self.barrier()
        for _, after in closings:
            after()
        axes = self._axes
        self._axes = {}
        for axis in axes.values():
            axis.close()
        leave = self._leave
        self._leave = lambda: None
        leave()
        self._pulse.stop()
        self.recorder.flight.close()


def init(
    mesh: Mesh,
    *,
    rank: int | None = None,
    store: Store | None = None,
    timeout_seconds: float = 300.0,
    backend: str = "auto",
    device: torch.device | str | None = None,
    measurements: Path | None = None,
    severance: Severance | None = None,
) -> World:
    """Join the world: the process group that exists, or one made from `rank` and `store`, or from
    torchrun's variables.

    Args:
        mesh: the axes; its size must be the number of ranks.
        rank: this process's rank; needed with `store`.
        store: where ranks meet; without it, torchrun's environment (`env://`) is used.
        timeout_seconds: after which a silent peer counts as failed.
        backend: `auto` (NCCL on CUDA; shared memory or Gloo on CPU), `native` (torch's operations
            as they are), `gloo`, or `shared`. The last is the memory of one host, which `auto` uses
            where it can. Tensors of a GPU pass `gloo` and `shared` by copies on the host. So does
            `auto` where a host has more ranks than GPUs, which NCCL refuses.
        device: of the tensors; default the CUDA device of this local rank if there is one, else the
            CPU.
        measurements: the folder of this machine's measurements; without one, ranks make no choice
            by the clock.
        severance: by which another thread can end every wait of this rank.

    Raises:
        WorldSizeError: the number of ranks is not the size of the mesh.
        PlanError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise PlanError(f"no backend {backend!r}; {nearest(backend, BACKENDS)}")
    place = RendezvousPlace.from_variables() if store is None else None
    if place is not None:
        return _apart(mesh, place, timeout_seconds, torch.device(device or "cpu"), measurements)
    device = own_device(device, rank)
    backend = backend_for(device, backend)
    makes_group = not dist.is_initialized()
    severance = severance or Severance()
    if makes_group:
        with severance.collecting(), whole_or_none():
            _make_group(mesh, rank, store, timeout_seconds, group_kind(device, backend))
    rank_here = dist.get_rank()
    size = dist.get_world_size()
    if size != mesh.size:
        if makes_group:
            dist.destroy_process_group()
        raise WorldSizeError(
            f"the plan needs {mesh.size} ranks and the world has {size}; start {mesh.size} ranks"
        )
    if mesh.ep > 1 and not mesh.node:
        mesh = replace(mesh, node=_ranks_a_node())
    links = Links(
        Groups(mesh, rank_here, timeout_seconds),
        backend,
        timeout_seconds,
        severance,
        on_device=device.type != "cpu",
        spans_hosts=not on_one_machine(os.environ),
    )

    def leave() -> None:
        links.close()
        if makes_group and dist.is_initialized():
            dist.destroy_process_group()

    world = World(mesh, rank_here, device, links.connect, leave, measurements=measurements)
    world.watch()
    return world


def _apart(
    mesh: Mesh,
    place: RendezvousPlace,
    timeout_seconds: float,
    device: torch.device,
    measurements: Path | None,
) -> World:
    """A world whose ranks come and go: each begins by itself (see `membership`)."""
    if mesh.size != mesh.dp or mesh.size != place.num_workers:
        raise WorldSizeError(
            f"ranks come and go on the data axis alone: {place.num_workers} workers do not fit "
            f"{mesh}"
        )

    def alone(name: AxisName) -> Backend:
        raise PlanError(f"axis {name}: this rank has not joined the other ranks yet")

    def regroup(members: tuple[int, ...]) -> None:
        rank = members.index(place.worker)
        met = Mesh(dp=len(members))
        world.regroup(
            met, rank, Links(Groups(met, rank, timeout_seconds), "gloo", timeout_seconds).connect
        )

    membership = Membership(place, timeout_seconds, regroup)
    leave = membership.close
    world = World(
        Mesh(), place.worker, device, alone, leave, measurements=measurements, membership=membership
    )
    world.watch()
    return world


def _ranks_a_node() -> int:
    """The number of ranks on each host. The result is 0 if they are all on one host, or not evenly
    in order over hosts.
    """
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return ranks_a_node(hosts)


def _make_group(
    mesh: Mesh, rank: int | None, store: Store | None, timeout_seconds: float, kind: str
) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    if store is None:
        listen_on(None)
        try:
            _join_told_world(kind, timeout)
        except ValueError as error:  # no world has been started here
            if mesh.size > 1:
                raise WorldSizeError(
                    f"the plan needs {mesh.size} ranks and this process is alone; start it with "
                    "plait.launch(main, "
                    f"nproc={mesh.size}) or torchrun --nproc-per-node {mesh.size}"
                ) from error
            dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif rank is None:
        raise PlanError("a store was given without a rank; give both, or neither under torchrun")
    else:
        dist.init_process_group(kind, store=store, rank=rank, world_size=mesh.size, timeout=timeout)
    if kind == "gloo":
        # a rank has joined once it has its own connections: if it left then, others would still be
        # joining
        dist.barrier()


_worlds = count()  # that this process has joined


def _join_told_world(kind: str, timeout: timedelta) -> None:
    """Join the world of torchrun's variables. Raises `ValueError` when they tell of none."""
    is_told = os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    store = (store_of_world(timeout) or open_store_of_world(timeout)) if is_told else None
    if store is None:
        dist.init_process_group(kind, timeout=timeout)
        return
    if earlier := next(_worlds):  # an agent's store still has the addresses of the earlier ones
        store = PrefixStore(f"world/{earlier}", store)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    RollCall(store, rank, size).answer(timeout)
    dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=timeout)
