"""The links of a world: which backend moves the bytes of each axis."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from plait.comm.backends.base import Backend
from plait.comm.backends.gloo import Gloo
from plait.comm.backends.native import Native
from plait.comm.backends.through_host import ThroughHost
from plait.comm.hosts import HostBlock, Hosts, ranks_a_node
from plait.comm.severance import Severance
from plait.comm.shm.memory import LockedMemory, MappedMemory
from plait.comm.shm.processes import Identity
from plait.comm.shm.processes import connect as connect_shared
from plait.comm.shm.semaphores import available
from plait.errors import PlanError
from plait.mesh import AxisName
from plait.mesh.groups import Groups


class Links:
    """Chooses the backend of each axis: the fastest that all ranks of its line can use.

    With `on_device` the tensors are a GPU's, and the backends of processors get copies of them.
    Ranks may lie on several hosts where it `spans_hosts`; alike on all ranks.
    """

    def __init__(
        self,
        groups: Groups,
        backend: str,
        timeout_seconds: float,
        severance: Severance | None = None,
        *,
        on_device: bool = False,
        spans_hosts: bool = False,
    ) -> None:
        self._groups = groups
        self._on_device = on_device
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._severance = severance or Severance()
        self._memory = MappedMemory(self._severance)
        self._spans_hosts = spans_hosts and backend == "auto"
        self._hosts: list[Any] = []  # of all ranks, once they are asked for

    def connect(self, name: AxisName) -> Backend:
        """The backend of an axis. Collective of its line.

        Raises:
            PlanError: backend `shared`, and ranks that cannot read each other's memory.
        """
        with self._severance.collecting():
            group = self._groups.group(name)
        if self._backend == "native":
            return Native(group)
        backend = self._of_processors(name, group)
        return ThroughHost(backend) if self._on_device else backend

    def _of_processors(self, name: AxisName, group: dist.ProcessGroup) -> Backend:
        gloo = Gloo(group)
        if self._backend == "gloo":
            return gloo
        block = self._ranks_a_host(name) if self._spans_hosts else 0
        if block > 1:
            return self._by_hosts(name, gloo, block) or gloo
        ranks = dist.get_process_group_ranks(group)
        shared = connect_shared(gloo, self._memory, self._timeout_seconds, ranks)
        if shared is None and self._backend == "shared":
            raise PlanError(
                f"the ranks of axis {name} cannot read each other's memory (other hosts?); use "
                "backend 'auto'"
            )
        return shared or gloo

    def _ranks_a_host(self, name: AxisName) -> int:
        """How many neighbours on each line of an axis share a host. Collective of all ranks.

        0 unless every line has as many on each of several hosts.
        """
        if not self._hosts:
            own = Identity.own() if available() else None
            self._hosts = [None] * self._groups.mesh.size
            known = None if own is None else (own.host, own.namespace, own.boot)
            dist.all_gather_object(self._hosts, known)
        lines = self._groups.mesh.lines(name)
        blocks = {ranks_a_node([self._hosts[rank] for rank in line]) for line in lines}
        return blocks.pop() if len(blocks) == 1 and None not in self._hosts else 0

    def _by_hosts(self, name: AxisName, line: Gloo, size: int) -> Hosts | None:
        """Memory on each host, and Gloo between them; None where memory cannot be read. Collective
        of all ranks.
        """
        severance = Severance()
        with self._severance.collecting(), severance.collecting():
            column = Gloo(self._groups.across(name, size))
        block = HostBlock(line, size)
        ranks = block.of(dist.get_process_group_ranks(line.group))
        memory = LockedMemory(self._severance)
        inside = connect_shared(block, memory, self._timeout_seconds, ranks)
        if not all(line.gather_objects(inside is not None)) or inside is None:
            return None
        return Hosts(line, column, inside, memory, severance)

    def close(self) -> None:
        """Give back the memory and the groups."""
        self._severance.forget()
        self._memory.close()
        self._groups.close()
