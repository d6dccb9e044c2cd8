"""Point-to-point on a fabric: buffered sends, and receives matched in order of posting for each
pair and tag.

A send copies its tensor into borrowed memory and is done. So pipelines cannot deadlock on the order
of sends and receives. A message waits in the sender's memory until the receiver copies it, once,
into place.
"""

from __future__ import annotations

from collections import defaultdict, deque

from torch import Tensor

from plait.comm.backends.base import Done, Handle
from plait.comm.shm.fabric import Fabric, InboundMessage
from plait.errors import RunError


class Receive(Handle):
    """A receive that was posted."""

    def __init__(self, mail: Mailbox, flat: Tensor, source: int) -> None:
        self._mail = mail
        self._flat = flat
        self.source = source
        self.arrived = False

    def accept(self, message: InboundMessage) -> None:
        """Copy the message into place.

        Raises:
            RunError: it is of another length or dtype.
        """
        flat = self._flat
        data = message.data
        if (flat.numel(), flat.dtype) != (data.numel(), data.dtype):
            raise RunError(
                f"coordinate {self.source} sent {data.numel()} {data.dtype} and {flat.numel()} "
                f"{flat.dtype} were expected"
            )
        flat.copy_(data)
        message.release()
        self.arrived = True

    def advance(self) -> None:
        """Take what is there."""
        while not self.arrived and self._mail.look(self.source, block=False):
            pass

    def wait(self) -> None:
        """Take messages of that peer until this one is served."""
        while not self.arrived:
            self._mail.look(self.source, block=True)


class CopiedMessage(InboundMessage):
    """A message in memory of this rank; the sender has had its own back."""

    def __init__(self, message: InboundMessage) -> None:
        self.tag = message.tag
        self.data = message.data.clone()
        message.release()

    def release(self) -> None:
        """Nothing is lent."""


class Mailbox:
    """The messages of one rank on one axis."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._posted: defaultdict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        self._waiting: defaultdict[tuple[int, int], deque[InboundMessage]] = defaultdict(deque)

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Copy `tensor` [...] into the box of rank `to`; done when it returns.

        A box that is full waits for its reader. Two ranks that both send would wait for each other.
        So messages that have come are taken first, those without a receive too. The last to wait
        has made room for the others.
        """
        for source, _ in [key for key, posted in self._posted.items() if posted]:
            while self.look(source, block=False):
                pass
        if self._fabric.is_full(to):
            self._take_aside()
        self._fabric.send_message(to, tag, tensor.view(-1))
        return Done()

    def _take_aside(self) -> None:
        """Make room in the boxes of all peers: what waits for a receive is copied."""
        for source in range(self._fabric.size):
            while source != self._fabric.rank and self.look(source, block=False):
                pass
        for queue in self._waiting.values():
            for index, message in enumerate(queue):
                if not isinstance(message, CopiedMessage):
                    queue[index] = CopiedMessage(message)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """Fill `tensor` [...] from rank `source`; served at once if its message is there."""
        receive = Receive(self, tensor.view(-1), source)
        waiting = self._waiting[source, tag]
        if waiting:
            receive.accept(waiting.popleft())
        else:
            self._posted[source, tag].append(receive)
        return receive

    def look(self, source: int, block: bool) -> bool:
        """Take the next message of a peer, if there is one or `block`, to the receive that it
        belongs to.
        """
        message = self._fabric.next_message(source, block)
        if message is None:
            return False
        posted = self._posted[source, message.tag]
        if posted:
            posted.popleft().accept(message)
        else:
            self._waiting[source, message.tag].append(message)
        return True
