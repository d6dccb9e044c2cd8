"""Tensors between stages: shapes are agreed once, receives are posted early, sends are not waited
for until needed.

What a stage sends depends on the shapes of the micro-batch's inputs, which every stage knows. So
sender and receiver agree on a form the first time that they meet those shapes. Later they send
nothing but tensors. A gradient has the form of its tensor.

A tensor may get no gradient at all, as one that is only read by `detach`. In the first step of its
shapes a byte for each gradient says whether there is one. Where all were there, none say so later.
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
    """Which boundaries say of each gradient whether there is one.

    Both ends of a boundary keep one, and see the same messages in each step.
    """

    def __init__(self) -> None:
        self._says: dict[Key, bool] = {}
        self._seen: dict[Key, bool] = {}

    def begin(self) -> None:
        """A step begins: what the last one has seen of new boundaries holds from now on."""
        self._says.update(self._seen)
        self._seen.clear()

    def forms(self, key: Key, num_gradients: int) -> tuple[TensorForm, ...]:
        """The form of what travels behind the gradients: a byte for each, or nothing."""
        if num_gradients == 0 or not self._says.get(key, True):
            return ()
        return (TensorForm((num_gradients,), torch.uint8, requires_grad=False),)

    def see(self, key: Key, missing: bool) -> None:
        """A message of a boundary that says so has passed."""
        if key not in self._says:
            self._seen[key] = missing or self._seen.get(key, False)


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
    ) -> None:
        """`gradient_extras` are the forms of tensors that travel with every set of gradients.

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
        self._missing = MissingGradients()
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self.num_forms_sent = 0

    def begin(self, shapes: Callable[[int], Shapes], *, recording: bool = True) -> None:
        """A step begins: `shapes(micro_batch)` are those of its inputs.

        `recording`: for a backward. An evaluation has forms of its own. It needs no gradient, sends
        no random state, and its model may return something else.
        """
        self._shapes = shapes
        self._recording = recording
        self._missing.begin()

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
        if self._is_here(stage - 1):
            self._handed[stage - 1, micro_batch] = grads
            return
        key = self._key(stage - 1, micro_batch)
        wanted = self._forms[key].gradients
        own, extras = grads[: len(wanted)], grads[len(wanted) :]
        filled = [
            torch.zeros(one.shape, dtype=one.dtype, device=self._device) if grad is None else grad
            for one, grad in zip(wanted, own, strict=True)
        ]
        sent = [one.lay(grad) for one, grad in zip(wanted, filled, strict=True)]
        sent += [extra for extra in extras if extra is not None]
        if self._presence(key):
            present = [grad is not None for grad in own]
            sent.append(torch.tensor(present, dtype=torch.uint8, device=self._device))
            self._missing.see(key, not all(present))
        self._outgoing["B", stage, micro_batch] = sent

    def send_gradients(self, stage: int, micro_batch: int) -> None:
        """Send what `put_gradients` has kept to the stage before."""
        self._send(self._outgoing.pop(("B", stage, micro_batch)), self.placement[stage - 1])

    def post_gradients(self, stage: int, micro_batch: int) -> None:
        """Post the receive of the gradients of the output of `stage`."""
        key = self._key(stage, micro_batch)
        form = self._forms[key]
        wanted = (*form.gradients, *self.gradient_extras, *self._presence(key))
        self._incoming["B", stage, micro_batch] = self._post(
            form, wanted, self.placement[stage + 1]
        )

    def take_gradients(self, stage: int, micro_batch: int) -> Gradients:
        """The gradients of the output of `stage`, once they are here: each of its tensor's shape,
        and `gradient_extras`.
        """
        if (stage, micro_batch) in self._handed:
            return self._handed.pop((stage, micro_batch))
        found: Gradients = [*self._incoming.pop(("B", stage, micro_batch)).wait()]
        key = self._key(stage, micro_batch)
        if self._presence(key):
            present = found.pop()
            assert present is not None
            kept = present.tolist()
            self._missing.see(key, not all(kept))
            found = [grad if there else None for grad, there in zip(found, kept, strict=True)]
        return found

    def _presence(self, key: Key) -> tuple[TensorForm, ...]:
        """The form of the bytes that say which gradients there are, where they travel.

        The ends of a boundary begin a step of an asynchronous schedule with other messages. So
        zeros are sent there for a missing gradient.
        """
        if self.gradient_extras:
            return ()
        return self._missing.forms(key, len(self._forms[key].gradients))

    # -- messages ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

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
