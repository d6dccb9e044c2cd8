"""The recording of a case: each rank's notes, what it holds, and what its ledger counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.comm.ledger import Ledger
from plait.comm.simulated import simulate
from plait.engine.build import build
from plait.engine.engine import Engine
from plait.engine.options import Options
from plait.engine.state.shards import module_shards
from plait.explain.case import MOMENTUM, Case, squared_error
from plait.explain.notebook import Notebook, NotedOperation, ProductMode
from plait.explain.noted import note_world, wrapped
from plait.mesh import Mesh, Shard
from plait.models.parameters import Parameters
from plait.models.routing import Router, Routing
from plait.values import PyTree


@dataclass(frozen=True)
class RankRecording:
    """The recording of one rank.

    Attributes:
        actions: of the schedule, each with its step.
        weights: the blocks of the parameters that lie here between two uses.
        updated: those that this rank's optimizer updates.
        after: the values of these at the end.
        memory: bytes by kind, after a step.
        ledger: of the steps, without the building of the engine.
        losses: of the steps.
        routed: by each forward of a router, in their order.
    """

    rank: int
    notes: list[NotedOperation]
    actions: list[tuple[int, str]]
    weights: list[Shard]
    updated: list[Shard]
    after: list[Shard]
    memory: dict[str, int]
    ledger: Ledger
    losses: list[float]
    routed: list[RoutedTokens]


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens [N, D] of one forward of a router, with the expert and the weight of each.

    A token that no expert has taken is dropped: its expert is None.
    """

    tokens: Tensor
    experts: list[int | None]
    weights: list[float]

    @classmethod
    def of(cls, tokens: Tensor, routing: Routing) -> RoutedTokens:
        """From a router's input [B, S, D] and its output, of one expert a token."""
        rows = tokens.detach().reshape(-1, tokens.shape[-1]).clone()
        experts: list[int | None] = [None] * len(rows)
        weights = [0.0] * len(rows)
        pairs = zip(routing.token.tolist(), routing.expert.tolist(), strict=True)
        for (token, expert), weight in zip(pairs, routing.weight.tolist(), strict=True):
            experts[token] = expert
            weights[token] = weight
        return cls(rows, experts, weights)


def record(case: Case) -> list[RankRecording]:
    """Run a case on simulated ranks; the recordings by rank."""
    models = [case.make_model() for _ in range(case.plan.world_size)]
    return simulate(Mesh.of(case.plan), partial(_rank, case=case, models=models), wrap=wrapped)


def _rank(world: World, case: Case, models: list[nn.Module]) -> RankRecording:
    notebook = note_world(world)
    with world.paths.limited(case.limits):
        return _recorded(world, notebook, case, models[world.rank])


def _recorded(world: World, notebook: Notebook, case: Case, model: nn.Module) -> RankRecording:
    """The steps of a case on one rank, noted. Collective."""
    has_blocks = case.plan.pp.size == 1
    engine = build(
        model,
        case.plan,
        loss=squared_error,
        optimizer=partial(_optimizer, case.learning_rate),
        options=Options(
            roles=case.roles, blocks="*" if has_blocks else None, linear_product="torch"
        ),
        world=world,
    )
    notebook.name_from(partial(_held, engine))
    _learn_activations(model, notebook)
    routed = _routed(model)
    axis = world.axis("dp")
    before = world.ledger.copy()
    del notebook.notes[:]
    del notebook.actions[:]
    weights = _copies(module_shards(engine.holding))
    updated = _copies(engine.local_parameters())
    losses = []
    batch = (
        case.inputs.tensor_split(axis.size)[axis.rank],
        case.targets.tensor_split(axis.size)[axis.rank],
    )
    with ProductMode(notebook):
        for step in range(case.num_steps):
            notebook.begin_step(step + 1)
            losses.append(engine.step(batch, trace=False).loss)
        notebook.begin_step(0)
        engine.flush()
    notebook.name_late_tensors()
    ledger = world.ledger.since(before)
    memory = engine.memory()
    after = _copies(engine.local_parameters())
    notes = list(notebook.notes)
    actions = list(notebook.actions)
    engine.driver.synchronize()
    world.close()
    return RankRecording(
        world.rank, notes, actions, weights, updated, after, memory, ledger, losses, routed
    )


def _optimizer(rate: float, params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=rate, momentum=MOMENTUM)


def _copies(shards: list[Shard]) -> list[Shard]:
    return [shard.like(short(shard.name), shard.values.clone()) for shard in shards]


def short(name: str) -> str:
    """The name of a weight: `W1` for `W1.weight`."""
    return name.removesuffix(".weight")


def _held(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Parameters and gradients of a rank by name, where they have memory now."""
    for state in engine.strategy.states:
        grad = state.grad
        if grad is not None and grad.numel() >= state.bucket.numel:
            for slot in state.bucket.slots:
                yield f"d{short(slot.name)}", grad.view(-1)[slot.offset : slot.stop]
    for piece in engine.strategy.pieces:
        shard = piece.part.shard(piece.value)
        is_whole = shard.numel == shard.box.numel
        part = "" if is_whole else f"[{shard.start}:{shard.stop}]"
        yield f"{short(shard.name)}{part}", piece.value
    for name, param in engine.holding.params.items():
        if param.untyped_storage().nbytes():
            yield short(name), param
        if param.grad is not None:
            yield f"d{short(name)}", param.grad


def _routed(model: nn.Module) -> list[RoutedTokens]:
    """The tokens of all forwards of the model's routers from now on, recomputed ones left out."""
    found: list[RoutedTokens] = []

    def after(router: Router, inputs: tuple[Any, ...], routing: Routing) -> None:
        if router.context.recording:
            found.append(RoutedTokens.of(inputs[0], routing))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(after)
    return found


def _learn_activations(model: nn.Module, notebook: Notebook) -> None:
    """Let a notebook know the inputs, the outputs and their gradients of all layers with a weight,
    by name.
    """

    def before(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        notebook.learn(f"X({name})", inputs[0])

    def after(name: str, module: nn.Module, inputs: PyTree, output: PyTree) -> None:
        if isinstance(output, Tensor):
            notebook.learn(f"Y({name})", output)
            if output.requires_grad:
                output.register_hook(partial(notebook.learn, f"dY({name})"))

    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            module.register_forward_pre_hook(partial(before, name))
            module.register_forward_hook(partial(after, name))
