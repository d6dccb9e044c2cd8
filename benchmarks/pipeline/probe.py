"""What actions and messages cost, measured on each rank's own stages alone: no schedule runs
against another, no rank waits.

A rank goes through its own list of computing once, on made-up messages of the form that its
neighbours send; its handlers are called as the runtime calls them. So weights and activations are
met in the order, and in the caches, of a step. All ranks probe at the same time, because cores
share memory in a run too. One pass is one draw of every action's time: ranks that wait for each
other wait for the slower draw of each pair, so a schedule is walked once with each draw, and the
walks' median is told.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm import Axis
from plait.parallel.pipeline.actions import COMPUTE, Action, Kind
from plait.parallel.pipeline.observed import Messages, StageCosts, observed_costs
from plait.parallel.pipeline.payload import TensorForm
from plait.parallel.pipeline.transport import _Arrival
from plait.trace import Timeline

Draw = dict[Action, float]
"""Seconds of each pass of one rank."""


def probe(engine: Any, batch: Any) -> Draw:
    """One draw. The engine has done a step before; its next step forgets the gradients of this
    one.
    """
    pipeline = engine.pipeline
    draw = {}
    _, actions = engine.training_step(batch).begin(batch)
    for action in actions:
        if action.kind is Kind.UNSHARD:
            engine._training_step._handlers[action.kind](action)
        elif action.kind in COMPUTE:
            draw[action] = _timed(pipeline, engine._training_step._handlers[action.kind], action)
    pipeline.transport.clear()
    return draw


def others(warm: list[Timeline]) -> StageCosts:
    """What is not of one stage alone, from steps before the measured ones: updates, posts,
    sends.
    """
    return {key: seconds for key, seconds in observed_costs(warm).items() if key[0] not in COMPUTE}


def _timed(pipeline: Any, handler: Any, action: Action) -> float:
    _deliver(pipeline, action)
    began = time.perf_counter()
    handler(action)
    seconds = time.perf_counter() - began
    pipeline.transport._outgoing.clear()
    return seconds


def _deliver(pipeline: Any, action: Action) -> None:
    """The message that the action would find, were its neighbours at work."""
    transport = pipeline.transport
    stage = action.stage
    index = action.micro_batch
    if action.kind is Kind.FORWARD and stage > 0 and not transport._is_here(stage - 1):
        form = transport._forms[transport._key(stage - 1, index)]
        transport._incoming["F", stage, index] = _Arrival(
            [_made_up(one) for one in form.tensors], [], form
        )
    backwards = action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
    if backwards and stage + 1 < pipeline.num_stages and not transport._is_here(stage + 1):
        form = transport._forms[transport._key(stage, index)]
        wanted = (*form.gradients, *transport.gradient_extras)
        transport._incoming["B", stage, index] = _Arrival(
            [_made_up(one) for one in wanted], [], form
        )


def _made_up(form: TensorForm) -> Tensor:
    return (
        torch.randn(form.shape, dtype=form.dtype)
        if form.dtype.is_floating_point
        else torch.zeros(form.shape, dtype=form.dtype)
    )


@dataclass(frozen=True)
class _Turn:
    """One exchange as one rank saw it: when its message had left and when the other had been taken.
    One host has one clock.
    """

    sent_seconds: float
    taken_seconds: float


def probe_messages(axis: Axis, engine: Any, repeats: int = 8) -> Messages:
    """What a message costs between two ranks that compute: medians over pairs of neighbours, both
    ways. Collective.

    Ranks exchange messages after different amounts of work: who has less must wait and wake up, who
    has more finds it there.
    """
    form = next(iter(engine.pipeline.transport._forms.values())).tensors[0]
    message = _made_up(form)
    own = {shard.name for shard in engine.local_parameters()}
    weights = [
        param for name, param in engine.model.named_parameters() if name in own and param.dim() == 2
    ]
    turns = axis.gather_objects(
        [_turn(axis, number, message, weights) for number in range(2 * repeats)]
    )
    waiting = []
    taking = []
    for pair in zip(turns[::2], turns[1::2], strict=False):
        for number, exchange in enumerate(zip(*pair, strict=True)):
            early = exchange[number % 2]
            late = exchange[1 - number % 2]
            waiting.append(early.taken_seconds - late.sent_seconds)
            taking.append(late.taken_seconds - late.sent_seconds)
    return Messages(
        max(0.0, statistics.median(waiting) - statistics.median(taking)), statistics.median(taking)
    )


def _turn(axis: Axis, number: int, message: Tensor, weights: list[Tensor]) -> _Turn:
    """Exchange `number`, between ranks 2k and 2k + 1; of an odd number of ranks the last has no
    peer.
    """
    peer = axis.rank ^ 1
    axis.barrier()
    if peer >= axis.size:
        return _Turn(0.0, 0.0)
    receive = axis.receive(torch.empty_like(message), peer)
    _work(weights, times=1 if number % 2 == axis.rank % 2 else 2)
    axis.send(message, peer).wait()
    sent = time.perf_counter()
    receive.wait()
    return _Turn(sent, time.perf_counter())


@torch.no_grad()
def _work(weights: list[Tensor], times: int) -> None:
    """What ranks do between messages: products with the own weights, a millisecond or a few."""
    for _ in range(times):
        for weight in weights:
            torch.ones(64, weight.shape[1]) @ weight.t()
