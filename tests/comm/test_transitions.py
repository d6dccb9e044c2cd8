"""Every pair of layouts, forward and backward and backward of backward, against a simulation in one
process.

The simulation knows only what the letters mean: `whole` reads the global value out of the parts of
all ranks, and a loss that weighs the global value of the result has a gradient that is known
without any communication.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from plait.comm import transition
from plait.comm.transitions import operation, transition_bytes, transition_bytes_backward
from plait.errors import PlanError
from plait.mesh import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded
from tests.helpers.threaded import threaded

SHAPE = (12, 24, 12)
LAYOUTS: list[Layout] = [REPLICATED, INVARIANT, PARTIAL, Sharded(0), Sharded(1), Sharded(-1)]
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _parts(value: torch.Tensor, layout: Layout, size: int, seed: int) -> list[torch.Tensor]:
    """What the ranks hold of `value`."""
    if isinstance(layout, Sharded):
        return [part.clone() for part in value.chunk(size, layout.dim)]
    if layout == PARTIAL:
        parts = [_draw(seed + rank, *value.shape) for rank in range(size - 1)]
        return [*parts, value - sum(parts)] if parts else [value.clone()]
    return [value.clone() for _ in range(size)]


def _whole(parts: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The value of what the ranks hold; for R and I all must agree bitwise."""
    if isinstance(layout, Sharded):
        return torch.cat(parts, layout.dim)
    if layout == PARTIAL:
        return sum(parts[1:], parts[0])
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def _both(world, parts, gradients, source, target):
    axis = world.axis("tp")
    tensor = parts[world.rank].requires_grad_()
    before = world.ledger.copy()
    result = transition(tensor, axis, source, target)
    forward = world.ledger.since(before)
    before = world.ledger.copy()
    outer = gradients[world.rank].requires_grad_()
    (inner,) = torch.autograd.grad(result, tensor, outer, create_graph=True)
    backward = world.ledger.since(before)
    (again,) = torch.autograd.grad(
        inner, outer, tensor.detach()
    )  # linear: the transpose of the transpose
    return result.detach(), inner.detach(), again, forward.bytes(), backward.bytes()


def _check(run, size, source, target):
    value = _draw(1, *SHAPE)
    gradient = _draw(2, *SHAPE)
    results = run(
        _parts(value, source, size, 10), _parts(gradient, target.dual(), size, 20), source, target
    )
    outs, inners, agains, forward, backward = zip(*results, strict=True)
    torch.testing.assert_close(_whole(list(outs), target), value, rtol=0, atol=1e-13)
    torch.testing.assert_close(_whole(list(inners), source.dual()), gradient, rtol=0, atol=1e-13)
    for out, again in zip(outs, agains, strict=True):
        torch.testing.assert_close(out, again, rtol=0, atol=1e-13)
    num_bytes = value.numel() * 8
    assert set(forward) == {transition_bytes(source, target, num_bytes, size)}
    assert set(backward) == {transition_bytes_backward(source, target, num_bytes, size)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
def test_every_pair_on_simulated_ranks(size):
    for source, target in PAIRS:
        _check(lambda *args: threaded(size, _both, *args, plan=_mesh(size)), size, source, target)


def _all_pairs(world, tasks):
    return [_both(world, *task) for task in tasks]


@pytest.mark.parametrize("backend", ["native", "gloo", "shared"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_pair_on_real_ranks(ranks, size, backend):
    tasks = []
    for source, target in PAIRS:
        value = _draw(1, *SHAPE)
        gradient = _draw(2, *SHAPE)
        tasks.append(
            (
                _parts(value, source, size, 10),
                _parts(gradient, target.dual(), size, 20),
                source,
                target,
            )
        )
    by_rank = ranks(size, _all_pairs, tasks, plan=_mesh(size), backend=backend)
    for index, (source, target) in enumerate(PAIRS):
        _check(lambda *_, i=index: [results[i] for results in by_rank], size, source, target)


def _mesh(size):
    from plait.mesh import Mesh

    return Mesh(tp=size)


def _gradient_of_a_loss(world, weight, x, y):
    """Megatron's pair: f = I -> R, g = P -> I, around a column- and a row-parallel product."""
    axis = world.axis("tp")
    columns = weight.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    rows = weight.chunk(world.size, 1)[world.rank].T.clone().requires_grad_()
    x = x.clone().requires_grad_()
    hidden = torch.tanh(transition(x, axis, INVARIANT, REPLICATED) @ columns)
    out = transition(hidden @ rows, axis, PARTIAL, INVARIANT)
    loss = ((out - y) ** 2).sum()
    loss.backward()
    return loss.detach(), x.grad, columns.grad, rows.grad


def test_a_tensor_parallel_layer_has_the_gradients_of_one_device():
    weight = _draw(1, 8, 12)
    x = _draw(2, 5, 8)
    y = _draw(3, 5, 8)
    one, four = (threaded(n, _gradient_of_a_loss, weight, x, y, plan=_mesh(n)) for n in (1, 4))
    for rank in range(4):
        torch.testing.assert_close(four[rank][0], one[0][0])
        torch.testing.assert_close(four[rank][1], one[0][1])
    torch.testing.assert_close(torch.cat([r[2] for r in four], 1), one[0][2])
    torch.testing.assert_close(torch.cat([r[3] for r in four], 0), one[0][3])


def test_what_does_not_divide_is_refused_alike_on_every_rank():
    def run(world):
        with pytest.raises(
            PlanError,
            match=r"dimension 0 of shape \(7, 2\) does not divide by the 4 ranks of axis tp",
        ):
            transition(torch.zeros(7, 2), world.axis("tp"), PARTIAL, Sharded(0))
        with pytest.raises(PlanError, match="no dimension 2"):
            transition(torch.zeros(8, 2), world.axis("tp"), Sharded(2), REPLICATED)

    threaded(4, run, plan=_mesh(4))


def test_halves_are_summed_in_float32(ranks):
    def once(world):
        return transition(
            torch.full((4,), 1.0 if world.rank == 0 else 2.0**-9, dtype=torch.bfloat16),
            *pair(world),
        )

    def pair(world):
        return world.axis("tp"), PARTIAL, INVARIANT

    expected = torch.tensor(1 + 7 * 2.0**-9).to(
        torch.bfloat16
    )  # one by one each 2**-9 would be rounded away
    assert expected > 1
    for result in threaded(8, once, plan=_mesh(8)):
        assert torch.equal(result, expected.expand(4))
    for backend in ("gloo", "shared"):
        for result in ranks(4, _half_sum, plan=_mesh(4), backend=backend):
            assert result.tolist() == [torch.tensor(1 + 3 * 2.0**-9).to(torch.bfloat16).item()] * 4


def _half_sum(world):
    part = torch.full((4,), 1.0 if world.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    return transition(part, world.axis("tp"), PARTIAL, INVARIANT)


def test_the_table_is_complete():
    assert all(operation(source, target) for source, target in PAIRS)
