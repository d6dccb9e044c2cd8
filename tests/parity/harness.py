"""The parity harness: the engine under a plan, on real ranks, against one device in plain
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.seeds import derive_seed
from plait.engine.state.init import Initializer, place_holders
from plait.mesh import Mesh
from plait.models import losses
from plait.plan import Plan
from plait.verify.ill_conditioned import nudged
from plait.verify.record.compare import largest, relative_error
from plait.verify.record.observation import Record
from plait.verify.reference.one_device import Slice, run_reference
from plait.verify.reference.recipe import Recipe
from tests.parity.families import Family, family_of

TOLERANCE = 1e-10  # float64, relative (plait.verify.record.compare says to what); never relaxed
SEED = 5


@dataclass
class Outcome:
    """Largest relative errors of one plan, and the name of the worst tensor."""

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    norm: float = 0.0
    worst: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str, error: float) -> None:
        if not error <= getattr(self, kind):
            setattr(self, kind, error)
            self.worst[kind] = name

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad, self.param, self.norm)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-6)


def check(
    run: Callable[..., list[Any]],
    plan_text: str,
    family: str | Family,
    num_samples: int = 12,
    **options: Any,
) -> Outcome:
    """Run one cell of the parity table; `run` is the `ranks` fixture. `node` is the number of ranks
    of a node, `device` that of the reference.
    """
    plan = Plan.parse(plan_text)
    mesh = replace(Mesh.of(plan), node=options.pop("node", 0))
    device = options.pop("device", "cpu")
    results = run(plan.world_size, run_engine, plan_text, family, num_samples, options, plan=mesh)
    return compare(
        results,
        reference(family, plan, num_samples, options, device=device),
        options.get("clip_grad_norm"),
    )


def run_engine(
    world: World,
    plan_text: str,
    family_name: str | Family,
    num_samples: int,
    options: dict[str, Any],
) -> list[Any]:
    """Train the family's steps on this rank; every rank returns its parts, the test joins them."""
    family = family_of(family_name)
    shares = options.get("shares")
    given = {key: value for key, value in options.items() if key != "shares"}
    return train(make_engine(world, plan_text, family, given), family, num_samples, shares)


def make_engine(
    world: World,
    plan_text: str,
    family: Family,
    options: dict[str, Any],
    model: nn.Module | None = None,
) -> Engine:
    """The engine of this rank, of the family's model or one that is given."""
    return build(
        model or family.model(),
        Plan.parse(plan_text),
        loss=losses.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, **options),
        world=world,
    )


def parts(tensor: Tensor, size: int, shares: Sequence[int] | None = None) -> Sequence[Tensor]:
    """The samples of each data rank, equal or by shares."""
    if shares is None:
        return tensor.tensor_split(size)
    return tensor.split([len(tensor) * share // sum(shares) for share in shares])


def train(
    engine: Engine, family: Family, num_samples: int, shares: Sequence[int] | None = None
) -> list[Any]:
    """(loss, norm, gradients, parameters) after every step, as this rank has them."""
    axis = engine.world.axis("dp")
    seen = []
    grads: list[Any] = []
    engine.before_update.append(lambda e: grads.append(e.local_gradients()))
    for whole in family.batches(num_samples):
        batch = tree_map(lambda leaf: parts(leaf, axis.size, shares)[axis.rank], whole)
        result = engine.step(batch, trace=False)
        seen.append((result.loss, result.grad_norm, grads.pop(), engine.local_parameters()))
        seen[-1] = (*seen[-1][:2], *(_copies(found) for found in seen[-1][2:]))
    return seen


def _copies(shards: list[Any]) -> list[tuple[str, tuple[int, ...], slice | Tensor, Tensor]]:
    return [(part.name, part.global_shape, part.index(), part.values.clone()) for part in shards]


def join(parts_by_rank: list[Any]) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks. Parts that overlap must agree to the last bit."""
    whole: dict[str, Tensor] = {}
    for parts in parts_by_rank:
        for name, shape, index, value in parts:
            flat = whole.setdefault(
                name, torch.full((torch.Size(shape).numel(),), float("nan"), dtype=value.dtype)
            )
            there = flat[index]
            known = ~there.isnan()
            assert torch.equal(there[known], value[known]), f"ranks differ in {name}"
            flat[index] = value
    return whole


def whole_model(family: Family) -> nn.Module:
    """On one device, with the values that engines begin with."""
    model = family.model()
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, SEED, torch.float64, torch.device("cpu")).run(take)
    return model


_REFERENCES: dict[Any, Record] = {}


def reference(
    family_name: str | Family,
    plan: Plan,
    num_samples: int,
    options: dict[str, Any],
    *,
    aside: bool = False,
    device: str = "cpu",
) -> Record:
    """One device, plain PyTorch; remembered, as many plans share it. `aside`: started about one bit
    away. The record is on the CPU.
    """
    family = family_of(family_name)
    by_micro_batch = family.by_micro_batch and plan.micro_batches > 1
    cut = (plan.dp.size, plan.micro_batches) if family.by_slice or by_micro_batch else None
    shares = options.get("shares")
    key = (
        repr(family_name),
        cut,
        num_samples,
        options.get("clip_grad_norm"),
        aside,
        shares,
        device,
    )
    if key not in _REFERENCES:
        model = whole_model(family)
        model = (nudged(model) if aside else model).to(device)
        recipe = Recipe(
            losses.cross_entropy, optimizer, clip_grad_norm=options.get("clip_grad_norm")
        )

        def slices(step: int, batch: tuple[Tensor, Tensor]) -> list[Slice]:
            return [
                Slice(
                    rank,
                    micro,
                    (x, y),
                    derive_seed(SEED, "step", step, rank * plan.micro_batches + micro),
                )
                for rank, (bx, by) in enumerate(
                    zip(*(parts(t, plan.dp.size, shares) for t in batch), strict=True)
                )
                for micro, (x, y) in enumerate(
                    zip(*(t.tensor_split(plan.micro_batches) for t in (bx, by)), strict=True)
                )
            ]

        batches = _on(device, family.batches(num_samples))
        how = {"by_slice": family.by_slice, "by_micro_batch": by_micro_batch}
        record = run_reference(model, batches, recipe, slices, **how)
        _REFERENCES[key] = record if device == "cpu" else _on_cpu(record)
    return _REFERENCES[key]


def _on(device: str, tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _on_cpu(record: Record) -> Record:
    steps = [
        replace(step, grads=_on("cpu", step.grads), params=_on("cpu", step.params))
        for step in record.steps
    ]
    return replace(record, steps=steps)


def compare(results: list[Any], record: Record, clip_grad_norm: float | None = None) -> Outcome:
    """The engine's ranks against the reference, step by step. (The reference keeps gradients as
    clipped.)
    """
    outcome = Outcome()
    for step, expected in enumerate(record.steps):
        by_rank = [rank[step] for rank in results]
        clipped = (
            1.0
            if clip_grad_norm is None
            else min(1.0, clip_grad_norm / (expected.grad_norm + 1e-6))
        )
        for loss, norm, _, _ in by_rank:
            outcome.note("loss", f"step {step}", abs(loss - expected.loss) / abs(expected.loss))
            outcome.note(
                "norm", f"step {step}", abs(norm - expected.grad_norm) / expected.grad_norm
            )
        params = join([rank[3] for rank in by_rank])
        grads = join([rank[2] for rank in by_rank])
        assert params.keys() == expected.params.keys()
        for name, value in expected.params.items():
            outcome.note(
                "param",
                name,
                relative_error(params[name].view_as(value), value, largest(expected.params)),
            )
        for name, value in expected.grads.items():
            assert (value is None) == (name not in grads), name
            if value is not None:
                grad = grads[name].view_as(value) * clipped
                outcome.note("grad", name, relative_error(grad, value, largest(expected.grads)))
    return outcome
