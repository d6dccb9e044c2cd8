"""Where torch's agent and the ranks of one machine meet: a store on loopback, and a rendezvous of
one agent.

The rendezvous that torch brings listens on all interfaces, and unpickles what it finds in its
store. One agent has no other to agree with: it needs a store, and its ranks the store's address.
"""

from __future__ import annotations

from functools import partial

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from plait.comm.network import LOOPBACK, listening_store

NAME = "plait-local"


class LocalRendezvous(RendezvousHandler):
    """One agent, which is the whole group; its ranks use the agent's store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = listening_store()

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """The ranks open no store of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, this agent as number 0 of 1, and where its ranks find the store."""
        told = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, told)

    def is_closed(self) -> bool:
        """Whether the group is closed: never, with one agent and no restarts."""
        return False

    def set_closed(self) -> None:
        """Close the group: no effect, since no other node could come."""

    def num_nodes_waiting(self) -> int:
        """The number of waiting nodes: always zero."""
        return 0

    def get_run_id(self) -> str:
        """The name of the run, which torch's agent gives its ranks."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with its last user."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


register = partial(rendezvous_handler_registry.register, NAME, _create)
"""Make it known to torch's agent, under `NAME`; a second call changes nothing."""
