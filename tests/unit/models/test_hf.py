"""GPT and Llama against transformers' own, with copied weights; and transformers' models behind our
door.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plait import models
from plait.errors import ModelError
from plait.models import hf
from plait.models.experts import MixtureOfExperts

pytest.importorskip("transformers")

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 50,
    "n_positions": 16,
}
GPT2 |= {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA |= {"intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 16}


def reset_all(model: nn.Module) -> None:
    """What an engine does to a meta model, without its seeds."""
    ties = {
        name: model.get_parameter(name)
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    first = {id(param): name for name, param in reversed(ties.items())}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for module in model.modules():
            if module._parameters or module._buffers:
                module.reset_parameters()
    for name, param in ties.items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(first[id(param)]))


def real(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = hf.make(config)
    reset_all(model)
    return model


def llama_names(name: str) -> str:
    for ours, theirs in [
        ("embed.", "model.embed_tokens."),
        ("head.", "lm_head."),
        ("blocks.", "model.layers."),
        (".attention.", ".self_attn."),
        (".norm1.", ".input_layernorm."),
        (".norm2.", ".post_attention_layernorm."),
    ]:
        name = name.replace(ours, theirs)
    for letter in ("q", "k", "v", "o", "gate", "up", "down"):
        name = name.replace(f".{letter}.", f".{letter}_proj.")
    return "model.norm.weight" if name == "norm.weight" else name


def put_norms_in_float64(theirs: nn.Module, norm: nn.Module) -> None:
    """Their RMS norm computes in float32 whatever it gets: it is held against ours alone, then
    replaced by ours.
    """
    x = torch.randn(3, 32)
    torch.testing.assert_close(theirs.model.model.norm(x).float(), norm(x.double()).float())
    for name, module in list(theirs.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            exact = nn.RMSNorm(32, eps=module.variance_epsilon, dtype=torch.float64)
            exact.weight = module.weight
            theirs.set_submodule(name, exact)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_equals_transformers(tied: bool) -> None:
    theirs = real(LLAMA | {"tie_word_embeddings": tied}).double()
    keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
    ours = models.make("llama", **keys, tie_word_embeddings=tied).double()
    values = theirs.model.state_dict()
    ours.load_state_dict({name: values[llama_names(name)] for name in ours.state_dict()})
    put_norms_in_float64(theirs, ours.norm)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    compare(ours, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_equals_transformers(tied: bool) -> None:
    theirs = real(GPT2 | {"tie_word_embeddings": tied}).double()
    ours = models.make(
        "gpt", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=50,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    ).double()  # fmt: skip
    state = theirs.model.transformer.state_dict()
    values = {"embed.weight": state["wte.weight"], "position.weight": state["wpe.weight"]}
    values |= {"norm.weight": state["ln_f.weight"], "norm.bias": state["ln_f.bias"]}
    values["head.weight"] = theirs.model.lm_head.weight
    for layer in range(2):
        for kind in ("weight", "bias"):
            block = {
                key: state[f"h.{layer}.{key}.{kind}"].t()
                for key in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj")
            }
            block |= {
                key: state[f"h.{layer}.{key}.{kind}"].t() for key in ("mlp.c_fc", "mlp.c_proj")
            }
            q, k, v = block["attn.c_attn"].chunk(3)
            parts = {
                "norm1": block["ln_1"],
                "norm2": block["ln_2"],
                "attention.q": q,
                "attention.k": k,
                "attention.v": v,
            }
            parts |= {
                "attention.o": block["attn.c_proj"],
                "mlp.up": block["mlp.c_fc"],
                "mlp.down": block["mlp.c_proj"],
            }
            values |= {f"blocks.{layer}.{key}.{kind}": value for key, value in parts.items()}
    ours.load_state_dict(values)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    compare(ours, theirs)


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    """Logits, and the gradient of the token embedding."""
    ids = torch.randint(0, 50, (2, 12))
    weight = torch.randn(2, 12, 50, dtype=torch.float64)
    expected = theirs(ids)
    logits = ours(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-10)
    (expected * weight).sum().backward()
    (logits * weight).sum().backward()
    torch.testing.assert_close(
        ours.embed.weight.grad,
        theirs.model.get_input_embeddings().weight.grad,
        rtol=1e-7,
        atol=1e-10,
    )


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_meta_and_every_owner_can_start_alone(config: dict[str, Any]) -> None:
    model = models.make("hf", config=config)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    reset_all(model)
    out = model(torch.randint(0, 50, (2, 5)))
    assert out.shape == (2, 5, 50)
    assert out.isfinite().all()
    for name, param in model.named_parameters():
        if param.dim() == 2:
            assert param.std().item() == pytest.approx(0.02, rel=0.2), name
        elif "norm" in name or "ln_" in name:
            assert torch.equal(
                param.detach(), torch.full_like(param, float(name.endswith("weight")))
            )


@pytest.mark.parametrize(
    ("config", "blocks"), [(GPT2, "model.transformer.h.*"), (LLAMA, "model.model.layers.*")]
)
def test_blocks_are_found(config: dict[str, Any], blocks: str) -> None:
    assert hf.blocks_of(hf.make(config)) == blocks


@pytest.mark.parametrize(
    "config", [GPT2, LLAMA | {"tie_word_embeddings": True}, LLAMA], ids=["gpt2", "tied", "llama"]
)
def test_weights_are_found_in_safetensors(config: dict[str, Any], tmp_path: Path) -> None:
    saved = real(config)
    saved.model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = models.make("hf", config=tmp_path, weights=tmp_path)
    assert all(tensor.is_meta for tensor in loaded.parameters())
    with loaded.weights.reading() as reader:
        for name, param in saved.named_parameters():
            assert torch.equal(reader.read(name), param), name
            if param.dim() == 2:
                assert torch.equal(reader.read(name, (slice(3, 7), slice(0, 5))), param[3:7, :5]), (
                    name
                )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_weights_of_a_base_model_fit_a_tied_one(tmp_path: Path) -> None:
    """As gpt2's own are published: without the prefix, and with the masks that earlier versions
    kept.
    """
    saved = real(GPT2)
    values = {name: param.detach() for name, param in saved.model.transformer.named_parameters()}
    save_file({**values, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "model.safetensors")
    loaded = hf.make(GPT2, weights=tmp_path)
    with loaded.weights.reading() as reader:
        assert torch.equal(
            reader.read("model.transformer.wte.weight"), saved.model.transformer.wte.weight
        )
    with pytest.raises(ModelError, match=r"do not fit the config: no lm_head.weight \(1 in all\)"):
        hf.make(GPT2 | {"tie_word_embeddings": False}, weights=tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = real(LLAMA)
    model.model.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"do not fit the config: .*\[48, 32\] instead of \[64, 32\]"
    ):
        hf.make(LLAMA | {"intermediate_size": 64}, weights=tmp_path)
    with pytest.raises(
        ModelError, match=r"no model.layers.2.self_attn.q_proj.weight, .* and 6 more \(9 in all\)"
    ):
        hf.make(LLAMA | {"num_hidden_layers": 3}, weights=tmp_path)
    with pytest.raises(
        ModelError,
        match=r"model.layers.1.input_layernorm.weight is not in the model, .* and 6 more \(9 in "
        r"all\)",
    ):
        hf.make(LLAMA | {"num_hidden_layers": 1}, weights=tmp_path)
    with pytest.raises(ModelError, match="hold no"):
        hf.make(LLAMA, weights=tmp_path / "nothing")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    real(LLAMA).model.save_pretrained(tmp_path, max_shard_size="20KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=f"lack {first.name}, which their index names"):
        hf.make(LLAMA, weights=tmp_path)
    second.rename(first)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"do not fit the config: no "):
        hf.make(LLAMA, weights=tmp_path)
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(ModelError, match=f"{first.name}' cannot be read"):
        hf.make(LLAMA, weights=tmp_path)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="'lama' is not one that transformers knows; did you mean 'llama'"
    ):
        hf.make({"model_type": "lama"})
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        hf.make(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        hf.make(tmp_path)
    with pytest.raises(ModelError, match="cannot make a causal model of model_type 't5'"):
        hf.make({"model_type": "t5"})


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match="needs the package transformers: pip install"):
        hf.make(GPT2)


MOE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
MOE |= {"intermediate_size": 48, "moe_intermediate_size": 24, "max_position_embeddings": 16}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2_moe": {**FOUR, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**FOUR, "model_type": "qwen3_moe", "head_dim": 8},
    "qwen3_moe, normalised": {
        **FOUR,
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_adopted_and_compute_what_the_library_computes(name: str) -> None:
    import transformers

    config = {**MOE, **MIXTURES[name]}
    ours = real(config)
    mixtures = [module for module in ours.modules() if isinstance(module, MixtureOfExperts)]
    assert len(mixtures) == 2
    table = {key: value for key, value in config.items() if key != "model_type"}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **table)
    )
    theirs.load_state_dict(ours.model.state_dict())
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert (
        mixtures[0].router.load is not None
        and mixtures[0].router.load[:4].sum() == 2 * 9 * mixtures[0].router.settings.num_chosen
    )


def test_a_model_of_the_library_itself_is_told_what_gives_it_roles() -> None:
    with pytest.raises(ModelError, match=r"plait\.models\.hf\.HuggingFace\(model\)"):
        models.roles_for(hf.make(LLAMA).model)


def test_threads_that_make_models_leave_the_default_type() -> None:
    """Ranks that are threads make their models at once, and the library sets the default type."""
    config = {**LLAMA, "dtype": "float64"}
    start = threading.Barrier(4)

    def make(_: int) -> None:
        start.wait()
        for _ in range(4):
            models.make("hf", config=config)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(4)))
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert found == torch.float32
