"""The notebook of one rank: every message, product and action of a run, with its values.

It stands where the flight recorder and the ledger stand, and looks through a dispatch mode. So it
sees what the code does, in its order, and the code does not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from plait.comm import World
from plait.comm.ledger import Ledger
from plait.doctor.flight import FlightRecorder
from plait.values import PyTree

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
ATTENTION = "scaled_dot_product"
UNCOUNTED = ("barrier", "gather_objects")
BEFORE = "build"


@dataclass(frozen=True)
class Place:
    """A range of memory, kept from being used again."""

    start: int
    stop: int
    owner: Tensor = field(repr=False)  # its storage may be empty by now

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """The bytes of a contiguous tensor [...], which the place keeps alive."""
        start = tensor.data_ptr()
        num_bytes = tensor.numel() * tensor.element_size()
        owner = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        return cls(start, start + num_bytes, owner)

    def meets(self, other: Place) -> bool:
        """Whether both have an element in common."""
        return self.start < other.stop and other.start < self.stop

    def part_of(self, other: Place) -> str:
        """The elements of the other that lie here, as `[4:8]`; empty where all do."""
        size = other.owner.element_size()
        first = max(0, self.start - other.start) // size
        last = (min(self.stop, other.stop) - other.start) // size
        whole = first == 0 and last == other.owner.numel()
        return "" if whole else f"[{first}:{last}]"


@dataclass
class NotedTensor:
    """Values [...] of a tensor at one moment, and the name of what lies there; empty for
    a new one.
    """

    name: str
    values: Tensor
    place: Place
    is_transposed: bool = False


def _is_transposed(tensor: Tensor) -> bool:
    if tensor.dim() != 2 or min(tensor.shape) == 1:
        return False
    return tensor.stride(0) < tensor.stride(1)


def _is_block(values: Tensor, whole: Tensor) -> bool:
    """Whether a matrix of such values is one of the equal blocks of another."""
    if values.dim() < 2 or whole.shape[-1] % values.shape[-1]:
        return False
    block = values.reshape(-1, values.shape[-1])
    rows = whole.reshape(-1, whole.shape[-1]).split(len(block))
    blocks = [part for row in rows for part in row.split(block.shape[1], dim=1)]
    return any(torch.equal(part, block) for part in blocks)


@dataclass
class NotedOperation:
    """One thing that a rank did.

    Attributes:
        step: of training, from 1; 0 before the first.
        action: the action of the schedule that it belongs to, as `0F0`.
        operation: `multiply`, or one of the ledger.
        ranks: that take part, by their global numbers.
        peer: the other rank of a message, or the root.
        bytes: sent by this rank, without padding.
        operands: values before, by name.
        results: values after it, by name.
    """

    rank: int
    step: int
    action: str
    operation: str
    axis: str = ""
    ranks: tuple[int, ...] = ()
    peer: int = -1
    bytes: int = 0
    padding_bytes: int = 0
    transport: str = ""
    operands: list[NotedTensor] = field(default_factory=list)
    results: list[NotedTensor] = field(default_factory=list)


class Notebook(FlightRecorder):
    """The notes of one rank, in their order."""

    def __init__(self, world: World) -> None:
        super().__init__(world.rank, world.size)
        self.notes: list[NotedOperation] = []
        self.actions: list[tuple[int, str]] = []
        self.step = 0
        self._state: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
        self._learned: list[tuple[str, Place]] = []
        self._inputs: list[tuple[str, Tensor]] = []
        self._action = BEFORE
        self._open: NotedOperation | None = None

    def action(self, text: str) -> None:
        """An action of the schedule begins."""
        super().action(text)
        self._action = text
        self.actions.append((self.step, text))

    def name_from(self, state: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Name operands that lie in the tensors of `state()`."""
        self._state = state

    def begin_step(self, step: int) -> None:
        """A step of training begins."""
        self.step = step
        self._action = BEFORE

    def counted(self, axis: str, op: str, num_bytes: int, padding_bytes: int) -> None:
        """The ledger has counted an operation."""
        note = self._new(op)
        note.axis = axis
        note.bytes = num_bytes
        note.padding_bytes = padding_bytes
        self._open = note

    def issue(
        self, axis: str, op: str, ranks: Sequence[int], num_bytes: int, peer: int = -1
    ) -> int:
        """A communication begins, after the ledger has counted it."""
        entry = super().issue(axis, op, ranks, num_bytes, peer)
        if op in UNCOUNTED:
            return entry
        note = self._open
        if note is None or op == "receive":
            note = self._new(op)
            note.axis = axis
        note.ranks = tuple(ranks)
        note.transport = op
        if peer >= 0:
            note.peer = ranks[peer]
        self._open = None
        return entry

    def multiplied(self, left: Tensor, right: Tensor, product: Tensor, name: str) -> None:
        """Note a product: its two operands [...], its result [...], and the name of torch's
        operation.
        """
        note = self._new("attention" if ATTENTION in name else "multiply")
        note.operands = [self.given(left), self.given(right)]
        note.results = [self.noted(product)]

    @property
    def last(self) -> NotedOperation:
        """The newest note."""
        return self.notes[-1]

    def learn(self, name: str, tensor: Tensor) -> None:
        """Know a tensor [...] by a name from here on; it stays alive, so that its place stays its
        own.
        """
        place = Place.of(tensor)
        self._learned.append((name, place))
        if name.startswith("X(") and not self._inputs:
            self._inputs.append((name, tensor.detach().clone()))

    def noted(self, tensor: Tensor) -> NotedTensor:
        """A copy of the values [...], with the name of what lies there."""
        place = Place.of(tensor)
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        name = self._name_at(place, self._held())
        return NotedTensor(name, values, place, _is_transposed(tensor))

    def name_late_tensors(self) -> None:
        """Give notes the names of tensors that became known after them."""
        for note in self.notes:
            for each in (*note.operands, *note.results):
                each.name = each.name or self._name_at(each.place, self._learned)

    def _name_at(self, place: Place, known: Iterable[tuple[str, Place]]) -> str:
        """Names of what lies at a place, joined; empty where nothing known does."""
        found: dict[int, str] = {}
        for name, other in (*known, *self._learned):
            if place.meets(other):
                found.setdefault(other.start, name + place.part_of(other))
        return ", ".join(dict.fromkeys(found.values()))

    def given(self, tensor: Tensor) -> NotedTensor:
        """The note `noted` of an operand [...], which may be a copy of the model's input, or of a
        block.
        """
        found = self.noted(tensor)
        values = found.values
        if not found.name and values.numel() and int(values.min()) != int(values.max()):
            found.name = self._name_like(values)
        return found

    def _name_like(self, values: Tensor) -> str:
        for name, other in self._inputs:
            if other.numel() == values.numel():
                if torch.equal(other.reshape(-1), values.reshape(-1)):
                    return name
            elif _is_block(values, other):
                return f"block of {name}"
        return ""

    def _held(self) -> Iterator[tuple[str, Place]]:
        for name, tensor in self._state():
            yield name, Place.of(tensor)

    def _new(self, operation: str) -> NotedOperation:
        note = NotedOperation(self.rank, self.step, self._action, operation)
        self.notes.append(note)
        return note


class NotedLedger(Ledger):
    """A ledger that tells a notebook of each count."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__()
        self._notebook = notebook

    def add(self, axis: str, op: str, num_bytes: int, padding_bytes: int = 0) -> None:
        """Count one operation."""
        super().add(axis, op, num_bytes, padding_bytes)
        self._notebook.counted(axis, op, num_bytes, padding_bytes)


class ProductMode(TorchDispatchMode):
    """Tells a notebook of every matrix product of its thread."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__()
        self._notebook = notebook

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[PyTree, ...] = (),
        kwargs: PyTree = None,
    ) -> PyTree:
        """Run an operation, and note it where it is a product."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS or (ATTENTION in name and "backward" not in name):
            tensors = [each for each in args if isinstance(each, Tensor)]
            left, right = tensors[1:3] if name in {"addmm", "baddbmm"} else tensors[:2]
            product = result[0] if isinstance(result, tuple) else result
            if product.device.type != "meta":
                self._notebook.multiplied(left, right, product, name)
        return result
