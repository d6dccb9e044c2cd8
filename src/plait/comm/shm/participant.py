"""One rank in one operation. It exposes a header and data and looks at those of its peers. Signals
say when it may be read and when it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from plait.comm.shm.fabric import Fabric, Header, Signal, Staged
from plait.comm.shm.progress import Operation, ProgressEngine, ProtocolStep


@dataclass
class Endpoint:
    """One rank's fabric, its operations under way, and the buffers that it has borrowed."""

    fabric: Fabric
    engine: ProgressEngine
    others: tuple[int, ...]
    borrowed: dict[int, Staged] = field(default_factory=dict)
    """By the address of the tensor."""


class Participant:
    """This rank in one operation: the header and data that it exposes, and those of the others."""

    def __init__(
        self,
        endpoint: Endpoint,
        op: str,
        tensor: Tensor,
        *,
        offsets: tuple[int, ...] = (),
        same_numel: bool = True,
        always_stage: bool = False,
        publish: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self._fabric = endpoint.fabric
        self._engine = endpoint.engine
        self._same_numel = same_numel
        self._seen: dict[int, tuple[Header, Tensor]] = {}
        self.staged: Staged | None = None
        self.source = tensor.reshape(-1)
        number = self._engine.next_number()
        self.header = Header(number, op, tensor.numel(), tensor.dtype, offsets)
        if not publish:
            return
        if tensor.is_contiguous() and tensor.data_ptr() in endpoint.borrowed:
            self.staged = endpoint.borrowed.pop(tensor.data_ptr())
        elif always_stage or not tensor.is_contiguous() or not self._fabric.readable(tensor):
            self.staged = self._fabric.stage(tensor.numel(), tensor.dtype)
            self.staged.tensor.view(tensor.shape).copy_(tensor)
        if self.staged is not None:
            self.source = self.staged.tensor
        self._fabric.publish(self.header, self.source)

    def of(self, peer: int) -> Tensor:
        """The flat data (numel,) that a peer (or this rank) exposes."""
        return self.source if peer == self._fabric.rank else self._look(peer)[1]

    def notice_of(self, peer: int) -> Header:
        """The header of a peer (or of this rank)."""
        return self.header if peer == self._fabric.rank else self._look(peer)[0]

    def check_part(self, peer: int, sent: int, expected: int) -> None:
        """Raise unless a peer sends as many elements as are expected of it."""
        if sent != expected:
            theirs = Header(
                self.header.number,
                f"all_to_all with {sent} elements for this rank,",
                sent,
                self.header.dtype,
            )
            Header(self.header.number, "all_to_all", expected, self.header.dtype).match(
                theirs, peer, True
            )

    def collective(self, *acts: Callable[[], object]) -> Operation:
        """Everyone shows, everyone reads: one act, or two with a signal between."""
        others = self._endpoint.others
        self._arrive(others)
        signals = (Signal.ARRIVE, Signal.MIDDLE)[: len(acts)]
        answers = (*signals[1:], Signal.EXIT)
        steps = [
            ProtocolStep(signal, others, act, answer, others)
            for signal, act, answer in zip(signals, acts, answers, strict=True)
        ]
        return self._issue([*steps, ProtocolStep(Signal.EXIT, others, self._release)])

    def give(self, readers: tuple[int, ...]) -> Operation:
        """Only show."""
        self._arrive(readers)
        return self._issue([ProtocolStep(Signal.EXIT, readers, self._release)])

    def take(self, sources: tuple[int, ...], act: Callable[[], object]) -> Operation:
        """Only read."""
        return self._issue([ProtocolStep(Signal.ARRIVE, sources, act, Signal.EXIT, sources)])

    def swap(
        self,
        to: tuple[int, ...],
        sources: tuple[int, ...],
        act: Callable[[], object],
        *,
        early: bool = True,
    ) -> Operation:
        """Show to some, read from others."""
        self._arrive(to)
        read = ProtocolStep(Signal.ARRIVE, sources, act, Signal.EXIT, sources)
        return self._issue([read, ProtocolStep(Signal.EXIT, to, self._release)], early)

    def exhibit(self) -> Operation:
        """Show to everyone until all have left; ready when everyone shows."""
        others = self._endpoint.others
        self._arrive(others)
        return self._issue(
            [ProtocolStep(Signal.ARRIVE, others), ProtocolStep(Signal.LEFT, others, self._release)]
        )

    def _arrive(self, readers: tuple[int, ...]) -> None:
        self._fabric.post(Signal.ARRIVE, *readers)

    def _issue(self, steps: list[ProtocolStep], early: bool = True) -> Operation:
        return self._engine.issue(steps, early=early and self.staged is not None)

    def _look(self, peer: int) -> tuple[Header, Tensor]:
        if peer not in self._seen:
            header = self._fabric.read(peer, self.header.number)
            self.header.match(header, peer, self._same_numel)
            self._seen[peer] = (header, self._fabric.data(peer, header))
        return self._seen[peer]

    def _release(self) -> None:
        if self.staged is not None:
            self.staged.release()
