"""Faults of a load: what does not come back, or comes back otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from plait.datasets import Loader
from plait.engine.state import saving
from tests.parity.faults import wrap
from tests.parity.planted.entry import Entry


def after_load(action: Callable[[Any], None]) -> Callable[[], list[Any]]:
    """Load, then `action(engine)`."""

    def make(original: Any) -> Any:
        def load(state: Any, checkpoint: Any) -> Any:
            meta = original(state, checkpoint)
            with torch.no_grad():
                action(state)
            return meta

        return load

    return lambda: [wrap(saving, "load_from", make)]


def on_states(action: Callable[[dict[str, Any]], None]) -> Callable[[], list[Any]]:
    """`action(state of a parameter)` on everything that the optimizer keeps."""

    def each(state: Any) -> None:
        for kept in state.update.optimizer.state.values():
            action(kept)

    return after_load(each)


def place(change: Callable[[dict[str, Any]], None]) -> Callable[[], list[Any]]:
    """The saved place in the data, changed before it is taken."""

    def make(original: Any) -> Any:
        def load(self: Any, state: Any, num_batches: int | None = None) -> None:
            changed = dict(state)
            change(changed)
            original(self, changed, None)

        return load

    return lambda: [wrap(Loader, "load_state_dict", make)]


def _swap_moments(kept: dict[str, Any]) -> None:
    kept["exp_avg"], kept["exp_avg_sq"] = kept["exp_avg_sq"].sqrt(), kept["exp_avg"].square()


def _round(tensor: Any) -> None:
    tensor.copy_(tensor.bfloat16())


def _weights(action: Callable[[Any], None]) -> Callable[[Any], None]:
    def act(state: Any) -> None:
        for piece in state.strategy.pieces:
            action(piece)
        state.strategy.publish()

    return act


def _other_order(state: Any) -> None:
    moments = [kept["exp_avg"] for kept in state.update.optimizer.state.values()]
    shapes: dict[Any, list[Any]] = {}
    for moment in moments:
        shapes.setdefault(tuple(moment.shape), []).append(moment)
    for alike in shapes.values():
        values = [moment.clone() for moment in alike]
        for moment, value in zip(alike, values[1:] + values[:1], strict=True):
            moment.copy_(value)


def _second_rank(state: Any) -> None:
    if state.world.axis("dp").rank == 1:
        for kept in state.update.optimizer.state.values():
            kept["exp_avg"].zero_()


def _new_steps(state: Any) -> None:
    state._training_step.index = 0


def _step_behind(state: Any) -> None:
    state._training_step.index -= 1


def _first_weight(state: Any) -> None:
    state.strategy.pieces[0].value.mul_(1.01)
    state.strategy.publish()


def no_state() -> list[Any]:
    return [patch.object(saving, "_load_optimizer_state", lambda *_: None)]


def no_place() -> list[Any]:
    return [patch.object(Loader, "load_state_dict", lambda *_: None)]


def _entry(name: str, part: str, patches: Any, plan: str = "dp2", **more: Any) -> Entry:
    return Entry(name, plan, f"resume-{part}", "resume", patches, how="resume", **more)


ENTRIES = [
    _entry("moments are lost", "optimizer", no_state),
    _entry("moments are lost, ZeRO-1", "optimizer", no_state, "dp2:zero1"),
    _entry("the optimizer counts anew", "optimizer", on_states(lambda k: k["step"].zero_())),
    _entry("the second moment is lost", "optimizer", on_states(lambda k: k["exp_avg_sq"].zero_())),
    _entry("moments change places", "optimizer", on_states(_swap_moments)),
    _entry("moments are rounded", "optimizer", on_states(lambda k: _round(k["exp_avg"]))),
    _entry("moments of another parameter", "optimizer", after_load(_other_order)),
    _entry("one rank's moments", "optimizer", after_load(_second_rank), "dp2:zero1"),
    _entry("the schedule begins anew", "schedule", after_load(_new_steps)),
    _entry("the schedule is a step behind", "schedule", after_load(_step_behind)),
    _entry("the data begin anew", "data", no_place),
    _entry("a batch is read again", "data", place(lambda s: s.update(position=12))),
    _entry("a batch is skipped", "data", place(lambda s: s.update(position=36))),
    _entry("half a batch is skipped", "data", place(lambda s: s.update(position=30))),
    _entry("the epoch is lost", "data", place(lambda s: s.update(epoch=1, position=24))),
    _entry("weights are rounded", "weights", after_load(_weights(lambda p: _round(p.value)))),
    _entry("one weight is loaded otherwise", "weights", after_load(_first_weight), "dp2:zero1"),
]
