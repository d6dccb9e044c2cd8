"""What an action costs, measured on each rank's own stages alone: no schedule runs, nothing is sent, no rank waits.

The stage gets made-up messages of the form that its neighbours send, and its handlers are called as the runtime calls them.
All ranks probe at the same time, because cores share memory and caches in a run too.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from plait.pipeline.actions import Action, Kind
from plait.pipeline.observed import observed_costs
from plait.pipeline.payload import TensorForm
from plait.pipeline.transport import _Arrival
from plait.trace import Timeline

Costs = dict[tuple[Kind, int], float]


def probe(engine: Any, batch: Any, repeats: int = 5, group: int = 1) -> Costs:
    """Median seconds of F, B (or I and W) on the stages of this rank. The engine has done a step before.

    Weight gradients that are made `group` micro-batches at once are measured so, in equal parts.
    """
    pipeline, found = engine._pipeline, {}
    kinds = {action.kind for action in engine._actions}
    passes = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if Kind.WEIGHT_GRAD in kinds else ()
    passes = (Kind.FORWARD, *passes, *((Kind.BACKWARD,) if Kind.BACKWARD in kinds else ()))
    engine.model.train()
    joined = pipeline.joined
    pipeline.begin(engine._step_of(batch))
    for stage in pipeline.parts:
        times: dict[Kind, list[float]] = {kind: [] for kind in passes}
        for _ in range(repeats):
            for backward in [kinds & {Kind.BACKWARD}, kinds & {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}]:
                for kind in (kind for kind in passes if backward and (kind is Kind.FORWARD or kind in backward)):
                    micro_batches = range(group if Kind.WEIGHT_GRAD in backward else 1)
                    actions = [Action(kind, stage, index) for index in micro_batches]
                    pipeline.joined = frozenset(actions[:-1])
                    seconds = [_timed(pipeline, engine._handlers[kind], action) for action in actions]
                    times[kind] += [sum(seconds) / group] if kind is Kind.WEIGHT_GRAD else seconds
        found.update({(kind, stage): statistics.median(seconds) for kind, seconds in times.items()})
    pipeline.transport.clear()
    pipeline.joined = joined
    return found


def others(warm: list[Timeline]) -> Costs:
    """What is not of one stage alone, from steps before the measured ones: updates, posts, sends."""
    computing = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    return {key: seconds for key, seconds in observed_costs(warm).items() if key[0] not in computing}


def _timed(pipeline: Any, handler: Any, action: Action) -> float:
    _deliver(pipeline, action)
    began = time.perf_counter()
    handler(action)
    seconds = time.perf_counter() - began
    pipeline.transport._outgoing.clear()
    return seconds


def _deliver(pipeline: Any, action: Action) -> None:
    """The message that the action would find, were its neighbours at work."""
    transport, stage, index = pipeline.transport, action.stage, action.micro_batch
    shapes = transport._shapes(0)
    if action.kind is Kind.FORWARD and stage > 0:
        form = transport._forms[stage - 1, shapes]
        transport._incoming["F", stage, index] = _Arrival([_made_up(one) for one in form.tensors], [], form)
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage + 1 < pipeline.num_stages:
        form = transport._forms[stage, shapes]
        transport._incoming["B", stage, index] = _Arrival([_made_up(one) for one in form.gradients], [], form)


def _made_up(form: TensorForm) -> Tensor:
    return (
        torch.randn(form.shape, dtype=form.dtype) if form.dtype.is_floating_point else torch.zeros(form.shape, dtype=form.dtype)
    )
