"""Adapters on packed experts: what names mean, what is refused, and sums in places of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import models
from plait.errors import ModelError
from plait.models.adapter_parts import AdapterSettings, parts_of
from plait.models.adapters import adapt, adapted, find_targets
from plait.models.expert_adapters import merged
from plait.models.low_rank import apart
from plait.verify.reference.plain.layers import plain_layers

MIXTURE = {
    "name": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
NAMES = ["blocks.0.mlp.experts", "blocks.1.mlp.experts"]


@pytest.mark.parametrize(
    ("target", "keys"),
    [
        ("experts", ("gate", "up", "down")),
        ("mlp.experts", ("gate", "up", "down")),
        ("experts.down", ("down",)),
        ("blocks.*.mlp.experts", ("gate", "up", "down")),
    ],
)
def test_a_target_names_experts_or_their_matrices(target: str, keys: tuple[str, ...]) -> None:
    model = models.make(**MIXTURE)
    assert find_targets(model, (target,)) == dict.fromkeys(NAMES, keys)


def test_a_name_of_linear_layers_means_these_alone() -> None:
    """A mixture's shared expert has layers with the names of the experts' matrices."""
    model = models.make(**MIXTURE, num_shared_experts=1)
    found = find_targets(model, ("up", "experts.up"))
    shared = [f"blocks.{i}.mlp.shared.up" for i in range(2)]
    assert found == dict.fromkeys(shared, ()) | dict.fromkeys(NAMES, ("up",))


def test_no_experts_are_adapted_by_default() -> None:
    assert not any(find_targets(models.make(**MIXTURE), None).values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "dora"}, "the experts 'blocks.0.mlp.experts' take lora alone"),
        ({"dropout": 0.1}, "the experts 'blocks.0.mlp.experts' have none, as in PEFT"),
    ],
)
def test_what_experts_cannot_have_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        adapt(models.make(**MIXTURE), AdapterSettings(targets=("q", "experts"), **settings))


class Packed(nn.Module):
    """Experts of somebody else: every token through all, in their own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 6, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if not torch.isfinite(tokens).all():
            raise ValueError("tokens are not finite")
        rows = [
            sum(
                weight * (self.down_proj[e] @ torch.relu(self.up_proj[e] @ token))
                for e, weight in zip(of_token.tolist(), of_weights, strict=True)
            )
            for token, of_token, of_weights in zip(tokens, chosen, weights, strict=True)
        ]
        return torch.stack(rows)  # type: ignore[arg-type]


def drawn(model: nn.Module) -> None:
    for module in adapted(model).values():
        for _, part in parts_of(module):
            nn.init.normal_(part.weight)  # type: ignore[arg-type]


def a_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"router": nn.Linear(4, 3), "experts": Packed()})
    adapt(model, AdapterSettings(rank=2, alpha=6, targets=("experts",)))
    drawn(model)
    return model


def test_a_forward_reads_sums_and_the_weights_are_back_afterwards() -> None:
    model = a_model()
    experts: Any = model["experts"]
    bare = {key: experts._parameters[key] for key in ("up_proj", "down_proj")}
    tokens, chosen, weights = torch.randn(5, 4), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    found = experts(tokens, chosen, weights)
    plain = Packed()
    for key, weight in bare.items():
        a, b = (getattr(experts, part)[key].weight for part in ("lora_A", "lora_B"))
        by_hand = [weight[e] + 3.0 * b[:, e::3] @ a[2 * e : 2 * e + 2] for e in range(3)]
        plain.get_parameter(key).data = torch.stack(by_hand).detach()
        summed = merged(weight, a, b, experts.adapter)
        torch.testing.assert_close(summed, torch.stack(by_hand))
    torch.testing.assert_close(found, plain(tokens, chosen, weights))
    with pytest.raises(ValueError, match="not finite"):
        experts(tokens * torch.inf, chosen, weights)
    for key, weight in bare.items():
        assert experts._parameters[key] is weight


def test_only_matrices_of_adapters_learn() -> None:
    model = a_model()
    experts: Any = model["experts"]
    experts(torch.randn(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1)).sum().backward()
    trained = {name for name, param in model.named_parameters() if param.grad is not None}
    keys = ("up_proj", "down_proj")
    assert trained == {f"experts.{p}.{k}.weight" for p in ("lora_A", "lora_B") for k in keys}
    a, b = (experts.__getattr__(part)["up_proj"].weight.grad for part in ("lora_A", "lora_B"))
    of_a, of_b = apart(a, b, 2)
    assert not of_a[2].any() and not of_b[2].any()  # nobody chose the third expert
    assert of_a[:2].any() and of_b[:2].any()


def test_the_reference_of_a_proof_adds_adapters_by_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault in the sums of a run is therefore not on both sides."""
    model = a_model()
    names = [name for name, _ in model.named_parameters()]
    inputs = torch.randn(5, 4), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    found = model["experts"](*inputs)  # type: ignore[index]

    def without_adapters(weight: Tensor, *args: object, **kwargs: object) -> Tensor:
        return weight

    monkeypatch.setattr("plait.models.expert_adapters.total", without_adapters)
    broken = model["experts"](*inputs)  # type: ignore[index]
    plain = plain_layers(model, {"adapter": {"rank": 2, "alpha": 6}})
    assert [name for name, _ in plain.named_parameters()] == names
    torch.testing.assert_close(plain["experts"](*inputs), found)  # type: ignore[index]
    assert not torch.allclose(broken, found)
