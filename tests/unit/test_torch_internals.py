"""Every private function of torch still does what plait needs of it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from plait import regions
from plait import torch_internals as internals


class Seen(TorchDispatchMode):
    """Counts the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_are_seen_and_hidden_from() -> None:
    assert not internals.has_dispatch_modes()
    with internals.no_dispatch_modes():
        torch.ones(1)
    with Seen() as seen:
        assert internals.has_dispatch_modes()
        torch.ones(1)
        before = seen.count
        with internals.no_dispatch_modes():
            torch.ones(1)
            assert not internals.has_dispatch_modes()
        assert seen.count == before > 0
        assert internals.has_dispatch_modes()


def test_function_transforms_are_seen() -> None:
    inside: list[bool] = []

    def square(x: Tensor) -> Tensor:
        inside.append(internals.has_function_transforms())
        return x * x

    torch.func.grad(square)(torch.tensor(2.0))
    assert inside == [True]
    assert not internals.has_function_transforms()


def test_a_backward_is_seen() -> None:
    x = torch.ones(1, requires_grad=True)
    inside: list[bool] = []
    y = x * 2
    y.register_hook(lambda grad: inside.append(internals.in_backward()))
    y.sum().backward()
    assert inside == [True]
    assert not internals.in_backward()


def test_tensors_on_one_storage_share_a_key() -> None:
    whole = torch.zeros(4, 4)
    assert internals.storage_key(whole) == internals.storage_key(whole[1:].t())
    assert internals.storage_key(whole) != internals.storage_key(torch.zeros(4, 4))


def test_fused_optimizers_divide_by_a_scale_themselves() -> None:
    param = torch.zeros(2, requires_grad=True)
    assert internals.takes_gradient_scale(torch.optim.AdamW([param], fused=True))
    assert not internals.takes_gradient_scale(torch.optim.SGD([param], lr=0.1, fused=False))


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "muon": lambda params: torch.optim.Muon(params, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_the_compiler_is_the_same_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(step: Any) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(6, 4))
        optimizer = OPTIMIZERS[name]([weight])
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            step(optimizer)
        return weight.detach(), optimizer.state_dict()["state"]

    expected = trained(lambda optimizer: optimizer.step())
    monkeypatch.setattr(internals, "_COMPILER", "a module that nobody loads")
    loads_compiler = name not in ("adafactor", "muon")  # torch wraps these two otherwise
    plain = internals._plain_step(OPTIMIZERS[name]([torch.zeros(2, 2)]))
    assert (plain is not None) == loads_compiler
    weight, state = trained(internals.step)
    assert torch.equal(weight, expected[0])
    torch.testing.assert_close(state, expected[1], rtol=0, atol=0)


def test_an_optimizer_with_hooks_or_of_somebody_else_makes_its_own_step() -> None:
    class Own(torch.optim.SGD):
        pass

    hooked = torch.optim.SGD([torch.zeros(1)])
    assert internals._plain_step(hooked) is not None
    hooked.register_step_pre_hook(lambda *given: None)
    replaced = torch.optim.SGD([torch.zeros(1)])
    replaced.step = lambda: None  # type: ignore[method-assign]
    for one in (hooked, replaced, Own([torch.zeros(1)])):
        assert internals._plain_step(one) is None


def test_flash_attention_has_an_output_and_a_backward() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse = internals.flash_cpu(q, k, v, 0.0, True)
        found = internals.flash_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    torch.testing.assert_close(out, expected)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert callable(internals.flash)
    assert callable(internals.flash_backward)


@pytest.mark.skipif(internals.onednn_linear() is None, reason="torch was built without oneDNN")
def test_onednn_multiplies_as_a_linear_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    weight = torch.randn(4, 8)
    bias = torch.randn(4)
    made = internals.onednn_linear()(x, weight, bias, "none", [], "")
    torch.testing.assert_close(made, F.linear(x, weight, bias))
    assert internals.onednn_linear().default is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_region_runs_alone_where_asked(reentrant: bool) -> None:
    layer = torch.nn.Linear(3, 3)
    calls: list[bool] = []

    def region(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return layer(x).tanh()

    x = torch.ones(2, 3, requires_grad=True)
    with regions.dissolved():
        checkpoint(region, x, use_reentrant=reentrant).sum().backward()
    assert calls == [True]
    found = x.grad
    x.grad = None
    checkpoint(region, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 3
    assert found is not None
    assert torch.equal(found, x.grad)


def test_a_group_whose_making_fails_is_forgotten_with_its_number() -> None:
    def make(store: dist.Store, size: int) -> None:
        wait = timedelta(seconds=0.2)
        dist.init_process_group("gloo", store=store, rank=0, world_size=size, timeout=wait)

    assert not dist.is_initialized()
    with pytest.raises(dist.DistError), internals.whole_or_none():
        make(dist.HashStore(), 2)  # the other rank does not come
    with pytest.raises(KeyboardInterrupt), internals.whole_or_none():
        make(dist.HashStore(), 1)
        raise KeyboardInterrupt
    assert not dist.is_initialized()
    assert distributed_c10d._world.group_count == 0
    make(dist.HashStore(), 1)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("word", "where"), [("fused", "meta"), ("capturable", "meta"), ("", "cpu")]
)
def test_a_count_of_steps_lies_where_the_update_reads_it(word: str, where: str) -> None:
    param = torch.zeros(3, device="meta")
    optimizer: Any = SimpleNamespace(param_groups=[{word: True}])
    count = internals.place_state(torch.tensor(4.0), param, optimizer)
    assert count.device.type == where
    assert internals.place_state(torch.zeros(3), param, optimizer).device.type == "meta"


def test_a_recomputation_stops_past_code_that_catches_exceptions() -> None:
    caught = []

    def catches(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.sin()
        except Exception as error:
            caught.append(error)
            raise RuntimeError("the sine has failed") from error

    internals.stop_past_exceptions()
    x = torch.ones(2, requires_grad=True)
    checkpoint(catches, x, use_reentrant=False).sum().backward()
    assert not caught
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2).cos())


def test_a_selective_recomputation_forgets_what_was_written_into() -> None:
    products = [torch.ops.aten.mm.default]
    first, again = create_selective_checkpoint_contexts(products)
    left, right = torch.ones(2, 2), torch.eye(2)
    with first:
        untouched, written = left @ right, left @ right
        written.add_(1)
    internals.forget_written(again, ())
    with again:
        kept, computed = left @ right, left @ right
    assert kept.data_ptr() == untouched.data_ptr()
    assert computed.data_ptr() != written.data_ptr()
    assert torch.equal(computed, torch.ones(2, 2))
