"""Fine-tune a Hugging Face model from safetensors, most of it frozen, and save it as `transformers`
loads it.

`python examples/finetune.py [--small] [--model DIR]`. Without a folder of weights a small Llama is
made and saved by transformers itself. Under `dp2:zero3 tp2`, each rank reads from the file what it
keeps, trains the last block and the norm, and writes its slices; transformers then loads the
result, whose weights are those of the same training in plain PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import equal, show

import plait

PLAN = "tp2 dp2:zero3"
CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def pretrained(folder: Path, layers: int) -> Path:
    """A model that transformers has made and saved."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": layers})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def freeze(model: Any, layers: int) -> None:
    """Train the last block and the last norm alone."""
    for name, param in model.named_parameters():
        param.requires_grad_(f"layers.{layers - 1}." in name or name.endswith("model.norm.weight"))


def batches(steps: int) -> Iterator[tuple[Any, Any]]:
    from plait import datasets

    loader = datasets.Loader(
        datasets.make({"name": "stdlib", "seq_len": 32}, {"vocab_size": 256}), 8
    )
    return (next(loader) for _ in range(steps))


def optimizer(params: Any) -> Any:
    import torch

    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-3, eps=1e-5)


def tune(weights: Path, target: Path, layers: int, steps: int) -> list[float]:
    """On this rank."""
    from plait import models
    from plait.engine.build import join_world
    from plait.models.losses import cross_entropy

    world = join_world(plait.Plan.parse(PLAN))
    model = models.make("hf", config=weights, weights=weights)
    freeze(model, layers)
    engine = plait.build(model, PLAN, loss=cross_entropy, optimizer=optimizer, world=world)
    axis = world.axis("dp")
    losses = []
    for batch in batches(steps):
        losses.append(
            engine.step(
                tuple(part.tensor_split(axis.size)[axis.rank] for part in batch), trace=False
            ).loss
        )
    engine.save_pretrained(target)
    world.close()
    return losses


def plain(weights: Path, layers: int, steps: int) -> tuple[list[float], Any]:
    """The losses and the model of transformers and PyTorch alone."""
    import transformers

    from plait.models.losses import cross_entropy

    model = transformers.AutoModelForCausalLM.from_pretrained(weights).train()
    freeze(model, layers)
    updates = optimizer(model.parameters())
    losses = []
    for inputs, targets in batches(steps):
        total, count = cross_entropy(model(input_ids=inputs, use_cache=False).logits, targets)
        (total / count).backward()
        updates.step()
        updates.zero_grad()
        losses.append(float((total / count).detach()))
    return losses, model


def main() -> int:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a setting that takes seconds")
    parser.add_argument(
        "--model", type=Path, help="a folder with config.json and safetensors of a causal model"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        help="where the curve and the model go (default: runs)",
    )
    given = parser.parse_args()
    steps = 4 if given.small else 40
    with tempfile.TemporaryDirectory() as folder:
        weights = given.model or pretrained(Path(folder), 2 if given.small else 4)
        import transformers

        layers = int(transformers.AutoConfig.from_pretrained(weights).num_hidden_layers)
        truth, expected = plain(weights, layers, steps)
        found = plait.launch(tune, weights, given.out / "finetuned", layers, steps, nproc=4)[0]
        show("finetune", {"one device, transformers": truth, PLAN: found}, given.out)
        print(f"largest difference {equal(found, truth, 1e-3):.1e}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(given.out / "finetuned")
    others = dict(expected.named_parameters())
    for name, value in loaded.named_parameters():
        if not others[name].requires_grad:
            assert torch.equal(value, others[name]), f"{name} was frozen and has changed"
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-3)
    print(f"transformers loads it: {given.out / 'finetuned'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
