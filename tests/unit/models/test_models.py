"""Laws that every model keeps: its tables are true, it is born on the meta device, its modules
start alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait import models
from plait.errors import ModelError

TINY = {
    "mlp": {"in_features": 8, "hidden_size": 16, "num_hidden_layers": 5, "out_features": 3},
    "gpt": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 32,
    },
    "resnet": {"depth": 18, "num_classes": 5, "width": 16},
    "fno": {"hidden_size": 8, "num_hidden_layers": 2, "modes": 3, "in_channels": 3},
}
NAMES = sorted(TINY)


def example(name: str) -> torch.Tensor:
    if name == "mlp":
        return torch.randn(3, 8)
    return torch.randn(2, 3, 16, 16) if name in ("resnet", "fno") else torch.randint(0, 32, (2, 6))


@pytest.mark.parametrize("name", NAMES)
def test_chain_composes_to_the_forward(name: str) -> None:
    model = models.make(name, **TINY[name])
    x = example(name)
    out = x
    for link in models.links(model, models.chain_of(name)):
        out = model.get_submodule(link)(out)
    torch.testing.assert_close(out, model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_every_module_with_parameters_has_one_role_and_every_pattern_fits(name: str) -> None:
    model = models.make(name, **TINY[name])
    roles = models.roles_of(name)
    if name == "resnet":  # patterns for either kind of block
        model = nn.ModuleDict({"stem": model.stem, "blocks": model.blocks, "head": model.head})
        roles = {
            pattern: role
            for pattern, role in roles.items()
            if not pattern.endswith(("conv3", "norm3"))
        }
    if (
        name == "llama"
    ):  # patterns for dense blocks and for mixtures of experts: here is one of each
        experts = {"num_local_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1}
        model = models.make(name, **TINY[name] | {"num_hidden_layers": 2}, **experts)
    modules = dict(model.named_modules())
    for module_name, module in modules.items():
        if module._parameters:
            fits = [pattern for pattern in roles if models.match(pattern, module_name)]
            assert len(fits) == 1, module_name
    for pattern in roles:
        assert any(models.match(pattern, module_name) for module_name in modules), pattern


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_links_of_the_chain(name: str) -> None:
    model = models.make(name, **TINY[name])
    blocks = models.blocks_of(name)
    assert blocks in models.chain_of(name)
    assert len(models.links(model, (blocks,))) == len(model.blocks)


@pytest.mark.parametrize("name", NAMES)
def test_born_on_meta_then_reset_alone_equals_reset_in_any_order(name: str) -> None:
    with torch.device("meta"):
        model = models.make(name, **TINY[name])
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)

    def start(reverse: bool) -> dict[str, torch.Tensor]:
        made = models.make(name, **TINY[name])
        owners = [
            (key, module)
            for key, module in made.named_modules()
            if module._parameters or module._buffers
        ]
        for key, module in reversed(owners) if reverse else owners:
            torch.manual_seed(len(key) + sum(map(ord, key)))
            with torch.no_grad():
                module.reset_parameters()
        return made.state_dict()

    forth = start(False)
    back = start(True)
    assert forth.keys() == back.keys()
    for key in forth:
        torch.testing.assert_close(forth[key], back[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = models.make(name, **TINY[name])
    out = model(example(name))
    (out * torch.randn_like(out)).sum().backward()
    assert [
        key for key, param in model.named_parameters() if param.grad is None or not param.grad.any()
    ] == []


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gtp", {}, "did you mean 'gpt'"),
        ("gpt", TINY["gpt"] | {"hidden_sise": 8}, "did you mean 'hidden_size'"),
        ("gpt", {"hidden_size": 16}, "needs num_hidden_layers, num_attention_heads, vocab_size"),
        (
            "gpt",
            TINY["gpt"] | {"num_attention_heads": 3},
            "hidden_size = 16 is not a multiple of num_attention_heads = 3",
        ),
        ("gpt", TINY["gpt"] | {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ("llama", TINY["llama"] | {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ("llama", TINY["llama"] | {"head_dim": 5}, "head_dim = 5 is odd"),
        ("resnet", {"depth": 20}, "depth 20; known: 18, 34"),
        ("resnet", {"norm": "grup"}, "did you mean 'group'"),
    ],
)
def test_errors_name_the_thing_and_the_cure(
    name: str, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        models.make(name, **keys)
    assert message in str(caught.value)


def test_keys_that_are_none_count_as_absent() -> None:
    assert (
        models.make("gpt", **TINY["gpt"], intermediate_size=None, dropout=None)
        .blocks[0]
        .mlp.up.out_features
        == 64
    )


def test_models_without_tables_have_empty_ones() -> None:
    assert models.roles_of("hf") == {}
    assert models.blocks_of("hf") is None
    assert models.chain_of("hf") == ()


def test_role_by_name() -> None:
    roles = models.roles_of("gpt")
    assert models.role("blocks.11.attention.q", roles) == "column"
    assert models.role("blocks.11.attention", roles) is None


def test_a_class_of_a_file_that_is_no_module_has_no_table() -> None:
    kind = type("Net", (nn.Module,), {"__module__": "run_by_its_path"})
    assert not models.has_roles(kind())
    with pytest.raises(ModelError, match="beside the class in run_by_its_path"):
        models.roles_for(kind())
