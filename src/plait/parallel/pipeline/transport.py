"""Tensors between stages: shapes are agreed once, receives are posted early, sends are not waited
for until needed.

What a stage sends depends on the shapes of the micro-batch's inputs, which every stage knows. So
sender and receiver agree on a form the first time that they meet those shapes. Later they send
nothing but tensors. A gradient has the form of its tensor.

A tensor may get no gradient at all, as one that is only read by `detach`. In the first step a byte
for each gradient says whether there is one. Where all were there, none say so later, and what is
missing then is sent as zeros.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.comm import Axis, Work
from plait.errors import ModelError
from plait.parallel.pipeline.payload import Payload, TensorForm
from plait.values import PyTree

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[int, bool, Shapes]  # stage, whether a backward follows, shapes of the inputs
Gradients = list[Tensor | None]  # of the tensors that want one; None where no gradient came


@dataclass(frozen=True)
class Form:
    """The form that passes a boundary for inputs of certain shapes."""

    tensors: tuple[TensorForm, ...]
    note: PyTree

    @property
    def gradients(self) -> tuple[TensorForm, ...]:
        """The forms of the gradients that come back: of the tensors that want one, contiguous."""
        return tuple(replace(form, order=()) for form in self.tensors if form.requires_grad)


@dataclass
class _Arrival:
    tensors: list[Tensor]
    works: list[Work]
    form: Form
    laid: Sequence[TensorForm] = ()  # of what is received; empty where it never left this rank

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        if not self.laid:
            return self.tensors
        return [form.restore(one) for form, one in zip(self.laid, self.tensors, strict=True)]


class MissingGradients:
    """The gradients that no rank of a stage has.

    Ranks of a stage agree on them, as their backwards talk to each other. Where one rank has a
    gradient, zeros stand for it on the others. The first step looks at all boundaries, and later
    steps at those that missed one then. Both ends of a boundary see the same.
    """

    def __init__(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        """`agree` joins what the ranks of a stage have. Collective."""
        self._agree = agree
        self._is_first = True
        self._boundaries = set[int]()

    def looks_at(self, boundary: int) -> bool:
        """Whether a boundary says of each gradient whether there is one."""
        return self._is_first or boundary in self._boundaries

    def agreed(self, boundary: int, present: list[bool]) -> list[bool]:
        """Which gradients any rank of the stage has. Collective."""
        present = self._agree(present)
        self.see(boundary, present)
        return present

    def see(self, boundary: int, present: Sequence[bool]) -> None:
        """Remember that a message of a boundary lacked a gradient, if it did."""
        if not all(present):
            self._boundaries.add(boundary)

    def end_step(self) -> None:
        """A step with a backward has ended."""
        self._is_first = False


class Transport:
    """The transfers of one rank. A boundary is named by the stage before it; `shapes` are those of
    a micro-batch's inputs.
    """

    def __init__(
        self,
        axis: Axis,
        placement: Sequence[int],
        device: torch.device,
        *,
        gradient_extras: tuple[TensorForm, ...] = (),
        wire: torch.dtype | None = None,
        agree: Callable[[list[bool]], list[bool]] = list,
    ) -> None:
        """`gradient_extras` are the forms of tensors that travel with every set of gradients.
        `agree` joins which gradients the ranks of a stage have.

        `wire`: the type in which wider activations and their gradients travel.
        """
        self._wire = wire
        self._axis = axis
        self.placement = tuple(placement)
        self._device = device
        self.gradient_extras = gradient_extras
        self._shapes: Callable[[int], Shapes] = lambda micro_batch: ()
        self._recording = True
        self._forms: dict[Key, Form] = {}
        self._outgoing: dict[tuple[str, int, int], list[Tensor]] = {}
        self._new_forms: dict[
            tuple[int, int], Form
        ] = {}  # (stage, micro-batch) whose send begins with its form
        self._incoming: dict[tuple[str, int, int], _Arrival] = {}
        self._handed: dict[tuple[int, int], Gradients] = {}  # between two stages of this rank
        self._missing = MissingGradients(agree)
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self.num_forms_sent = 0

    def begin(self, shapes: Callable[[int], Shapes], *, recording: bool = True) -> None:
        """A step begins: `shapes(micro_batch)` are those of its inputs.

        `recording`: for a backward. An evaluation has forms of its own. It needs no gradient, sends
        no random state, and its model may return something else.
        """
        self._shapes = shapes
        self._recording = recording

    def _key(self, stage: int, micro_batch: int) -> Key:
        return stage, self._recording, self._shapes(micro_batch)

    # -- forward -----------------------------------------------------------------------------------

    def put_output(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Take the output of `stage`, for its send or for the next stage on this rank.

        Raises:
            ModelError: another output of the stage had other shapes, for inputs of these shapes.
        """
        forms = tuple(TensorForm.of(tensor, self._wire) for tensor in payload.tensors)
        form = Form(forms, payload.note)
        key = self._key(stage, micro_batch)
        local = self._is_here(stage + 1)
        known = self._forms.get(key)
        if known is None:
            self._forms[key] = form
            if not local:
                self._new_forms[stage, micro_batch] = form
        elif known.tensors != form.tensors:
            raise ModelError(
                f"stage {stage} returned {_shapes_text(form)} for micro-batch {micro_batch} and "
                f"{_shapes_text(known)} before, "
                f"for inputs of the same shapes {list(key[2])}: what a stage returns must not "
                f"change shape with values{_cure(payload, form, known)}"
            )
        tensors = [tensor.detach() for tensor in payload.tensors]
        if local:
            self._incoming["F", stage + 1, micro_batch] = _Arrival(tensors, [], self._forms[key])
        else:
            forms = self._forms[key].tensors
            laid = [form.lay(tensor) for form, tensor in zip(forms, tensors, strict=True)]
            self._outgoing["F", stage, micro_batch] = laid

    def send_output(self, stage: int, micro_batch: int) -> None:
        """Send what `put_output` has kept to the next stage."""
        to = self.placement[stage + 1]
        form = self._new_forms.pop((stage, micro_batch), None)
        if form is not None:
            self._send_form(form, to)
        self._send(self._outgoing.pop(("F", stage, micro_batch)), to)

    def post_input(self, stage: int, micro_batch: int) -> None:
        """Post the receive of the input of `stage`. The first of its shapes waits for the form."""
        key = self._key(stage - 1, micro_batch)
        source = self.placement[stage - 1]
        if key not in self._forms:
            self._forms[key] = self._receive_form(source)
        self._incoming["F", stage, micro_batch] = self._post(
            self._forms[key], self._forms[key].tensors, source
        )

    def take_input(self, stage: int, micro_batch: int) -> Payload:
        """The input of `stage`, as leaves of a graph."""
        arrival = self._incoming.pop(("F", stage, micro_batch))
        tensors = arrival.wait()
        for tensor, form in zip(tensors, arrival.form.tensors, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return Payload(tensors, arrival.form.note)

    # -- backward ----------------------------------------------------------------------------------

    def put_gradients(self, stage: int, micro_batch: int, grads: Gradients) -> None:
        """The gradients of the input of `stage`: kept for their send, or handed to the stage before
        on the same rank.

        Each has the shape of its tensor; tensors of `gradient_extras` follow them.
        """
        if stage == 0:
            return
        wanted = self._forms[self._key(stage - 1, micro_batch)].gradients
        own, extras = grads[: len(wanted)], grads[len(wanted) :]
        present = self._present(stage - 1, own)
        filled = [
            torch.zeros(one.shape, dtype=one.dtype, device=self._device) if grad is None else grad
            for one, grad in zip(wanted, own, strict=True)
        ]
        if self._is_here(stage - 1):
            kept = [grad if there else None for grad, there in zip(filled, present, strict=True)]
            self._handed[stage - 1, micro_batch] = [*kept, *extras]
            return
        sent = [one.lay(grad) for one, grad in zip(wanted, filled, strict=True)]
        sent += [extra for extra in extras if extra is not None]
        if self._bytes_of_presence(stage - 1, len(wanted)):
            sent.append(torch.tensor(present, dtype=torch.uint8, device=self._device))
        self._outgoing["B", stage, micro_batch] = sent

    def _present(self, boundary: int, grads: Gradients) -> list[bool]:
        """Which gradients are to arrive: zeros stand for what is missing on this rank alone."""
        present = [grad is not None for grad in grads]
        if self._bytes_of_presence(boundary, len(grads)):
            return self._missing.agreed(boundary, present)
        return [True] * len(grads)

    def send_gradients(self, stage: int, micro_batch: int) -> None:
        """Send what `put_gradients` has kept to the stage before."""
        self._send(self._outgoing.pop(("B", stage, micro_batch)), self.placement[stage - 1])

    def post_gradients(self, stage: int, micro_batch: int) -> None:
        """Post the receive of the gradients of the output of `stage`."""
        form = self._forms[self._key(stage, micro_batch)]
        presence = self._bytes_of_presence(stage, len(form.gradients))
        wanted = (*form.gradients, *self.gradient_extras, *presence)
        self._incoming["B", stage, micro_batch] = self._post(
            form, wanted, self.placement[stage + 1]
        )

    def take_gradients(self, stage: int, micro_batch: int) -> Gradients:
        """The gradients of the output of `stage`, once they are here: each of its tensor's shape,
        and `gradient_extras`.
        """
        if (stage, micro_batch) in self._handed:
            return self._handed.pop((stage, micro_batch))
        arrival = self._incoming.pop(("B", stage, micro_batch))
        found: Gradients = [*arrival.wait()]
        if self._bytes_of_presence(stage, len(arrival.form.gradients)):
            there = found.pop()
            assert there is not None
            present = there.tolist()
            self._missing.see(stage, present)
            found = [grad if one else None for grad, one in zip(found, present, strict=True)]
        return found

    def _bytes_of_presence(self, boundary: int, count: int) -> tuple[TensorForm, ...]:
        """The form of the bytes that say which of `count` gradients there are, where they travel.

        The ends of a boundary begin a step of an asynchronous schedule with other messages. So
        zeros are sent there for a missing gradient.
        """
        if self.gradient_extras or not count or not self._missing.looks_at(boundary):
            return ()
        return (TensorForm((count,), torch.uint8, requires_grad=False),)

    # -- messages ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()
        if self._recording:
            self._missing.end_step()

    def clear(self) -> None:
        """Forget what is under way, after a failure."""
        self._outgoing.clear()
        self._incoming.clear()
        self._handed.clear()
        self._sent.clear()

    def _is_here(self, stage: int) -> bool:
        return self.placement[stage] == self._axis.rank

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            self._sent.append((self._axis.send(whole, to), whole))
        while (
            len(self._sent) > self._axis.size * 4
        ):  # long gone: receives are posted in the order of sends
            self._sent.popleft()[0].wait()

    def _post(self, form: Form, wanted: Sequence[TensorForm], source: int) -> _Arrival:
        tensors = [one.empty(self._device) for one in wanted]
        works = [self._axis.receive(tensor, source) for tensor in tensors]
        return _Arrival(tensors, works, form, wanted)

    def _send_form(self, form: Form, to: int) -> None:
        """Length, then bytes. Between the ranks of one run; nothing from outside is unpickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8).to(self._device)
        size = torch.tensor([data.numel()], device=self._device)
        self._send([size, data], to)
        self.num_forms_sent += 1

    def _receive_form(self, source: int) -> Form:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._axis.receive(size, source).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._axis.receive(data, source).wait()
        form: Form = pickle.loads(data.cpu().numpy().tobytes())
        return form


def _cure(payload: Payload, now: Form, known: Form) -> str:
    """Names the module whose result changes its shape, where the payload says who made it."""
    apart = [one != before for one, before in zip(now.tensors, known.tensors, strict=False)]
    names = [name for name, differs in zip(payload.sources, apart, strict=False) if differs]
    if not names:
        return ""
    return (
        f"; '{names[0]}' gets rows that are chosen by values: put the layer that chooses them and "
        "calls it into an nn.ModuleList of layers, so that no stage ends inside it, or leave pp out"
    )


def _shapes_text(form: Form) -> str:
    return ", ".join(str(list(one.shape)) for one in form.tensors) or "nothing"
