"""The links of a world: which backend moves the bytes of each axis."""

from __future__ import annotations

import torch.distributed as dist

from plait.comm.backends.base import Backend
from plait.comm.backends.gloo import Gloo
from plait.comm.backends.native import Native
from plait.comm.backends.through_host import ThroughHost
from plait.comm.severance import Severance
from plait.comm.shm.memory import MappedMemory
from plait.comm.shm.processes import connect as connect_shared
from plait.errors import PlanError
from plait.mesh import AxisName
from plait.mesh.groups import Groups


class Links:
    """Chooses the backend of each axis: the fastest that all ranks of its line can use.

    With `on_device` the tensors are a GPU's, and the backends of processors get copies of them.
    """

    def __init__(
        self,
        groups: Groups,
        backend: str,
        timeout_seconds: float,
        severance: Severance | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self._groups = groups
        self._on_device = on_device
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._severance = severance or Severance()
        self._memory = MappedMemory(self._severance)

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
        shared = connect_shared(
            gloo, self._memory, self._timeout_seconds, dist.get_process_group_ranks(group)
        )
        if shared is None and self._backend == "shared":
            raise PlanError(
                f"the ranks of axis {name} cannot read each other's memory (other hosts?); use "
                "backend 'auto'"
            )
        return shared or gloo

    def close(self) -> None:
        """Give back the memory and the groups."""
        self._severance.forget()
        self._memory.close()
        self._groups.close()
