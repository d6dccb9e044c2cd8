"""Scans and causal convolutions under context parallelism: their state goes from rank to rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.build import Options, build
from plait.engine.splitting import call_without_values
from plait.models.losses import cross_entropy
from plait.parallel.context.rehearsal import rehearse
from plait.parallel.context.scans import Carrier, adopt, carrier_of, handing
from plait.parallel.context.trunk import Trunk
from plait.random_state import drawn_alone
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE

V, D, H, LENGTH = 13, 16, 4, 16


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[B, C, S], with the interface of the package of that name."""
    reach = weight.shape[-1] - 1
    mixed = F.conv1d(F.pad(x, (reach, 0)), weight[:, None], bias, groups=x.shape[1])
    return F.silu(mixed)


def decaying_scan(
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A matrix of keys and values [B, H, K, K] that fades, read at each position [B, S, H, K]."""
    state = torch.zeros_like(keys[:, 0, :, :, None] * values[:, 0, :, None])
    state = state if initial_state is None else initial_state
    read = []
    for key, value in zip(keys.unbind(1), values.unbind(1), strict=True):
        state = decay.sigmoid()[:, None, None] * state + key[..., None] * value[..., None, :]
        read.append((key[..., None] * state).sum(-2))
    return torch.stack(read, 1), state if output_final_state else None


def flowing_scan(
    x: Tensor, *, initial_states: Tensor | None = None, return_final_states: bool = False
) -> Any:
    """A sum [B, D] with other words for its state; alone where that is all that is asked for."""
    total = x.cumsum(1) if initial_states is None else x.cumsum(1) + initial_states[:, None]
    return (total, total[:, -1]) if return_final_states else total


class Recurrent(nn.Module):
    """A convolution of four positions, then a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(D, 2 * D)
        self.kernel = nn.Parameter(torch.randn(2 * D, 4) / 2)
        self.decay = nn.Parameter(torch.randn(H))
        self.leave = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        mixed = causal_conv1d_fn(self.enter(x).transpose(1, 2), self.kernel).transpose(1, 2)
        keys, values = (part.unflatten(-1, (H, -1)) for part in mixed.chunk(2, -1))
        return self.leave(decaying_scan(keys, values, self.decay)[0].flatten(2))


class Flowing(nn.Module):
    """Sums of all positions before; nothing that its parameters reach comes ahead of the scan."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(flowing_scan(x) / LENGTH)


class Attending(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Final(nn.Module):
    """Asks for the last state too, which one rank alone has."""

    def forward(self, x: Tensor) -> Tensor:
        total, last = flowing_scan(x, return_final_states=True)
        return total + last[:, None]


class Block(nn.Module):
    """Mixers beside each other, then an MLP."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixers = nn.LayerNorm(D), nn.ModuleList(mixers)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for mixer in self.mixers:
            x = x + mixer(y)
        return x + self.mlp(x)


class Hybrid(nn.Module):
    """Token numbers -> logits."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(D, V)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hybrid() -> Hybrid:
    """A scan, a scan beside attention, and attention alone."""
    attending = Block(Attending())
    return Hybrid(Block(Recurrent()), Block(Recurrent(), Attending(), Flowing()), attending)


def trained(world: Any, plan: str, frozen: str = "", length: int = LENGTH) -> list[Any]:
    """Losses and norms of gradients, then the parameters after two steps."""
    with drawn_alone(0):
        model = hybrid().double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or name.endswith(frozen))
    engine = build(
        model,
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(clip_grad_norm=100.0, blocks="layers.*"),
        world=world,
    )
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, V, (4, length + 1), generator=generator)
        result = engine.step((tokens[:, :-1], tokens[:, 1:]), trace=False)
        found += [result.loss, result.grad_norm]
    return found


PLANS = ["cp2:ring", "cp2:ulysses", "cp4:ring", "cp2:ring remat:full", "cp2:ring dp2:zero3"]


@pytest.mark.parametrize("plan", [*PLANS, "cp4:ulysses", "cp2:ring remat:selective"])
def test_states_that_are_handed_on_give_what_one_device_has(plan: str) -> None:
    """Under cp4:ring a piece has two positions, and the convolution looks back over three."""
    alone = threaded(1, trained, "dp1", plan="dp1")[0]
    ranks = 4 if "4" in plan or "dp2" in plan else 2
    for found in threaded(ranks, trained, plan, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.parametrize("frozen", ["decay", "kernel"])
def test_ranks_agree_which_states_have_gradients(frozen: str) -> None:
    """Only a parameter of the scan itself is trained, so nothing that came before it has any."""
    alone = threaded(1, trained, "dp1", frozen, plan="dp1")[0]
    for found in threaded(2, trained, "cp2:ring", frozen, plan="cp2:ring"):
        assert found == pytest.approx(alone, rel=TOLERANCE)


def trunk_of(model: nn.Module) -> Trunk:
    example = torch.zeros(1, 8, dtype=torch.int64)
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    return rehearse(
        model, blocks, lambda make: call_without_values(model, example, make), "ring", 2
    )


def test_no_layer_of_a_hybrid_gets_whole_sequences() -> None:
    trunk = trunk_of(hybrid())
    assert not trunk.whole and trunk.tail is None
    assert trunk.scans["layers.0.mixers.0"] == {
        "causal_conv1d_fn.x": 2,
        "decaying_scan.keys": 1,
        "decaying_scan.values": 1,
    }
    assert trunk.attention == {"layers.1.mixers.1", "layers.2.mixers.0"}


def test_a_scan_whose_last_state_is_used_sees_whole_sequences() -> None:
    trunk = trunk_of(Hybrid(Block(Final())))
    assert set(trunk.whole) == {"layers.0.mixers.0"} and not trunk.scans


def test_functions_are_known_by_their_arguments() -> None:
    plain: Any = decaying_scan.function if isinstance(decaying_scan, Carrier) else decaying_scan
    assert carrier_of(plain) is not None
    assert carrier_of(trained) is None
    adopt([Recurrent()])
    carrier: Any = globals()["decaying_scan"]
    adopt([Recurrent()])
    assert globals()["decaying_scan"] is carrier and isinstance(carrier, Carrier)
    x = torch.ones(1, 2, 1, 1)
    with handing(lambda _carrier, _args, _kwargs: "handed"):
        assert carrier(x, x, x[0, 0, 0]) == "handed"
        with handing(None):
            assert carrier(x, x, x[0, 0, 0])[1] is None
