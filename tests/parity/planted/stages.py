"""Faults of pipelines and experts, of shared parameters, recomputation and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F

from plait.engine import engine, recompute, training_step, update
from plait.engine.balance import Balance
from plait.engine.stages.tied import TiedSum
from plait.engine.state import computed_buffers
from plait.models import experts
from plait.models.routing import Router
from plait.parallel.expert import dispatch
from plait.parallel.expert.router_context import RankRouterContext
from plait.parallel.pipeline import stage, transport
from tests.parity import faults
from tests.parity.faults import after, wrap
from tests.parity.planted.entry import ONE_DEVICE, Entry

# -- pipeline
# --------------------------------------------------------------------------------------------------


def boundary_gradients(change: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    """Another gradient for what a stage received."""

    def make(original: Any) -> Any:
        def backward(self: Any, micro_batch: int, grads: Any) -> Any:
            return [change(grad) for grad in original(self, micro_batch, grads)]

        return backward

    return lambda: [wrap(stage.Stage, "backward", make)]


def no_tied_sum() -> list[Any]:
    return [patch.object(TiedSum, "sum", lambda self: None)]


def tied_sum_twice() -> list[Any]:
    def make(original: Any) -> Any:
        def twice(self: Any) -> None:
            original(self)
            original(self)

        return twice

    return [wrap(TiedSum, "sum", make)]


def norm_of_a_stage() -> list[Any]:
    def make(original: Any) -> Any:
        def totals(self: Any, loss: Any, axis: Any, stages: Any, *sums: Any, **named: Any) -> Any:
            found = original(self, loss, axis, stages, *sums, **named)
            own = float(self._strategy.squared_norm(self._weight))
            return found if stages is None else replace(found, squared_norm=own)

        return totals

    return [wrap(update.Update, "totals", make)]


def weight_gradients_lost() -> list[Any]:
    """Those of the first micro-batch, where they are computed by themselves."""

    def make(original: Any) -> Any:
        def weight_grad(self: Any, micro_batch: int, **keys: Any) -> None:
            if micro_batch == 0:
                self._live.pop(micro_batch)
                return
            original(self, micro_batch, **keys)

        return weight_grad

    return [wrap(stage.Stage, "weight_grad", make)]


def inputs_of_the_first() -> list[Any]:
    """Every micro-batch continues from what the first one sent."""

    def make(original: Any) -> Any:
        def put(self: Any, number: int, micro_batch: int, payload: Any) -> None:
            if not hasattr(self, "_kept"):
                self._kept = payload.tensors[0].detach().clone()
            same = payload.tensors[0].shape == self._kept.shape
            if same and micro_batch:
                payload.tensors[0].data.copy_(self._kept)
            original(self, number, micro_batch, payload)

        return put

    return [wrap(transport.Transport, "put_output", make)]


def second_stage_stays() -> list[Any]:
    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            kept = [piece.value.detach().clone() for piece in self._strategy.pieces]
            original(self, change)
            for piece, value in zip(self._strategy.pieces, kept, strict=True):
                if piece.name.startswith(("head", "norm")):
                    piece.value.data.copy_(value)

        return step

    return [wrap(update.Update, "make", make)]


# -- experts
# --------------------------------------------------------------------------------------------------


def auxiliary(factor: Callable[[Any], float]) -> Callable[[], list[Any]]:
    """The auxiliary loss times `factor(context)`."""

    def make(original: Any) -> Any:
        def attach(self: Any, output: Any, loss: Any) -> Any:
            return original(self, output, None if loss is None else loss * factor(self))

        return attach

    return lambda: [wrap(RankRouterContext, "attach", make)]


def router_learns_nothing() -> list[Any]:
    def make(original: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            routing = original(self, x)
            if not isinstance(self.context, RankRouterContext):
                return routing
            return type(routing)(routing.token, routing.expert, routing.weight.detach())

        return forward

    return [wrap(Router, "forward", make)]


def next_expert() -> list[Any]:
    """Rows that have travelled are given to the next expert."""

    def make(original: Any) -> Any:
        def wait(self: Any) -> Any:
            rows, counts = original(self)
            return rows, [*counts[1:], counts[0]]

        return wait

    return [wrap(dispatch._RankDispatch, "wait", make)]


def load_of_one_rank() -> list[Any]:
    """Balancing by bias sees the tokens of this rank alone."""

    class Alone:
        def all_reduce(self, tensor: Any, **keys: Any) -> Any:
            return faults.Done()

    def make(original: Any) -> Any:
        def act(self: Any) -> None:
            tokens, self._tokens = self._tokens, Alone()
            self._tokens.size = tokens.size
            original(self)
            self._tokens = tokens

        return act

    # The bias of each rank is told of too, by a warning, and warnings are errors here.
    is_not_told = patch.object(computed_buffers, "_warn", lambda *told: None)
    return [wrap(Balance, "after_update", make), is_not_told]


def experts_divided() -> list[Any]:
    """Gradients of experts are divided by the ranks that share their tokens."""

    def make(original: Any) -> Any:
        def forward(self: Any, rows: Any, counts: Any) -> Any:
            for weight in (self.gate, self.up, self.down):
                if len(weight) < 4 and not getattr(weight, "_halved", False):
                    weight._halved = True
                    weight.register_hook(lambda grad: grad / 2)
            return original(self, rows, counts)

        return forward

    return [wrap(experts.Experts, "forward", make)]


# -- parameters that are shared or tied; recomputation; random numbers
# --------------------------------------------------------------------------------------------------


def hooked(name: str, factor: float) -> Callable[[], list[Any]]:
    """The gradient of one parameter, times a factor."""

    def act(self: Any) -> None:
        dict(self.model.named_parameters())[name].register_hook(lambda grad: grad * factor)

    return lambda: [wrap(engine.Engine, "__init__", after(act))]


def head_is_detached() -> list[Any]:
    """A tied weight learns from one of its two uses."""

    def act(self: Any) -> None:
        head = self.model.head
        head.forward = lambda x: F.linear(x, head.weight.detach(), head.bias)

    return [wrap(engine.Engine, "__init__", after(act))]


def recomputed_otherwise() -> list[Any]:
    """What is recomputed is not what ran."""

    def make(original: Any) -> Any:
        def checkpointed(name: str, block: Any, *around: Any) -> Any:
            forward = block.forward
            calls: list[int] = []

            def twice(x: Any, *args: Any, **keys: Any) -> Any:
                calls.append(1)
                again = len(calls) % 2 == 0
                return forward(x * 1.01 if again else x, *args, **keys)

            with patch.object(block, "forward", twice):
                return original(name, block, *around)

        return checkpointed

    return [wrap(recompute, "_checkpointed", make)]


def masks_of_the_first_micro_batch() -> list[Any]:
    def seed(*words: Any) -> int:
        from plait.engine.state import init

        return init.derive_seed(*words[:-1], words[-1] // 2 * 2)

    return [patch.object(training_step, "derive_seed", seed)]


def nothing_is_dropped() -> list[Any]:
    def act(self: Any) -> None:
        for module in self.model.modules():
            for key in ("p", "dropout"):
                if isinstance(getattr(module, key, None), float):
                    setattr(module, key, 0.0)

    return [wrap(engine.Engine, "__init__", after(act))]


BALANCED = {"model": "experts", "model_keys": {"router_aux_loss_coef": 0.1}}
BIAS = {
    "model": "experts",
    "model_keys": {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "router_bias_update_speed": 0.05,
    },
}
DROP = {"probe": "dropout"}
ENTRIES = [
    Entry(
        "gradients between stages",
        "pp2 mb2",
        "scale-some",
        "pp",
        boundary_gradients(lambda g: g / 2),
    ),
    Entry(
        "gradients between stages swap samples",
        "pp2 mb2",
        "module",
        "pp",
        boundary_gradients(lambda g: g.flip(0)),
        module="blocks.0",
    ),
    Entry(
        "tied weights apart",
        "pp2 mb2",
        "missing-reduction",
        "pp",
        no_tied_sum,
        probe="tied",
        module="embed",
    ),
    Entry(
        "tied weights twice",
        "pp2 mb2",
        "scale-some",
        "pp",
        tied_sum_twice,
        probe="tied",
        module="embed",
    ),
    Entry("the norm of a stage", "pp2 mb2", "norm", "pp", norm_of_a_stage, probe="clipping"),
    Entry("weight gradients lost", "pp2:zb-h1 mb4", "dropped", "mb", weight_gradients_lost),
    Entry("inputs of the first", "pp2 mb2", "module", "mb", inputs_of_the_first),
    Entry("the last stage stays", "pp2 mb2", "stale", "dp", second_stage_stays, module="head"),
    Entry(
        "auxiliary loss left out",
        "dp2",
        "auxiliary-loss",
        "experts",
        auxiliary(lambda c: 0.0),
        **BALANCED,
    ),
    Entry(
        "auxiliary loss of each rank",
        "dp2",
        "auxiliary-loss",
        "dp",
        auxiliary(lambda c: 2.0),
        **BALANCED,
    ),
    Entry(
        "auxiliary loss of each micro-batch",
        "mb3",
        "auxiliary-loss",
        "mb",
        auxiliary(lambda c: 3.0),
        **BALANCED,
    ),
    Entry(
        "the router learns nothing",
        "dp2 ep2",
        "dead",
        ONE_DEVICE,
        router_learns_nothing,
        module="router",
        model="experts",
    ),
    Entry("the next expert", "dp2 ep2", "module", "ep", next_expert, module="mlp", model="experts"),
    Entry(
        "the load of one rank", "dp2", "module", "dp", load_of_one_rank, module="experts", **BIAS
    ),
    Entry(
        "experts are divided",
        "dp2 ep2",
        "scale-some",
        "ep",
        experts_divided,
        module="experts",
        model="experts",
    ),
    Entry(
        "one gradient twice",
        "dp2",
        "scale-some",
        "dp",
        hooked("blocks.1.mlp.up.weight", 2.0),
        module="blocks.1.mlp.up",
    ),
    Entry(
        "half of a tied weight",
        "dp2",
        "scale-some",
        "dp",
        hooked("embed.weight", 0.5),
        probe="tied",
        module="embed",
    ),
    Entry(
        "one use of a tied weight",
        "dp2",
        "module",
        ONE_DEVICE,
        head_is_detached,
        probe="tied",
        module="embed",
    ),
    Entry(
        "recomputed otherwise",
        "mb2 remat:full",
        "module",
        "remat",
        recomputed_otherwise,
        module="blocks",
    ),
    Entry(
        "masks of the first micro-batch",
        "dp2 mb2",
        "dropout",
        "mb",
        masks_of_the_first_micro_batch,
        **DROP,
    ),
    Entry("nothing is dropped", "dp2", "dropout", "dropout", nothing_is_dropped, **DROP),
]
