"""Flower's link state and grid in memory, with a thread for each node: its messages and its apps,
no process and no Ray.

A node does what Flower's SuperNode does: it takes its messages from the link state one by one,
hands each to the client's app, and gives the answer (or the error) back to the link state.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from plait.outer.federated.flower import client_app

RUN = 7
TASK = 1
LOOK_SECONDS = 0.01
FOREVER_SECONDS = 1e9
Watch = Callable[[int, Message], None]
"""(client, message): called with every question before it is carried, and with every answer; what
it raises is the answer.
"""


def context(config: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Context:
    return Context(
        run_id=RUN,
        node_id=0,
        node_config=dict(config),
        state=RecordDict(),
        run_config=dict(run or {}),
    )


@contextmanager
def grid_of(
    rooms: Mapping[int, Path], watch: Watch = lambda client, message: None
) -> Iterator[InMemoryGrid]:
    """A grid whose nodes carry messages to the sockets in `rooms`, by client."""
    factory = LinkStateFactory(
        FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
    )
    state: Any = factory.state()
    run = Run.create_empty(run_id=RUN)
    run.federation_id = NOOP_FEDERATION_ID
    run.primary_task_id = TASK
    state.run_ids[RUN], state.task_store[TASK] = RunRecord(run=run), Task(task_id=TASK, run_id=RUN)
    TaskIdentity.task_id = TASK
    TaskIdentity.run_id = RUN
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    grid = InMemoryGrid(factory)
    over = threading.Event()
    grid.set_run(run)
    nodes = [
        threading.Thread(target=live, args=(state, client, room, watch, over))
        for client, room in rooms.items()
    ]
    for node in nodes:
        node.start()
    try:
        yield grid
    finally:
        over.set()
        for node in nodes:
            node.join()


def live(state: Any, client: int, room: Path, watch: Watch, over: threading.Event) -> None:
    """The life of a node."""
    app = client_app()
    node = state.create_node(str(client), str(client), secrets.token_bytes(32), FOREVER_SECONDS)
    state.acknowledge_node_heartbeat(node, FOREVER_SECONDS)
    own = context({"partition-id": client, "resident": str(room / "resident")})
    while not over.wait(LOOK_SECONDS):
        for message in state.get_message_ins(node, limit=1):
            try:
                watch(client, message)
                answer = app(message, own)
                watch(client, answer)
            except Exception as error:  # as a SuperNode says it
                answer = Message(Error(code=0, reason=repr(error)), reply_to=message)
            answer.metadata.__dict__["_message_id"] = str(uuid4())
            state.store_message_res(answer)
