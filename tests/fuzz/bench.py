"""The sound originals (a config, a cluster, a schedule, a run's folder, a checkpoint), and the
folder where damaged copies go.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from plait.checkpoint import Shard, save
from plait.parallel.pipeline.actions import Kind
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.observed import simulated_step
from plait.parallel.pipeline.schedules import make
from plait.trace import Timeline
from tests.fuzz.words import toml

GPT: Final = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}
LLAMA: Final = {**GPT, "name": "llama", "num_key_value_heads": 1, "num_local_experts": 4}
MLP: Final = {
    "name": "mlp",
    "in_features": 64,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "out_features": 10,
}
RESNET: Final = {"name": "resnet", "depth": 18, "num_classes": 10, "in_channels": 1, "width": 8}
FNO: Final = {"name": "fno", "hidden_size": 8, "num_hidden_layers": 2, "modes": 2}
HF: Final = {
    "name": "hf",
    "config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2},
}
MODELS: Final = (GPT, LLAMA, MLP, RESNET, FNO, HF)
FEDERATED: Final = {"clients": 4, "rounds": 2, "partition": "dirichlet", "strategy": "fedavg"}
CLUSTER: Final = {
    "device": {"preset": "a100-80gb", "memory_gb": 40, "peak_tflops": 300, "price_per_hour": 2},
    "node": {"devices": 4, "bandwidth_gbps": 300, "latency_us": 2},
    "network": {"bandwidth_gbps_per_device": 200, "latency_us": 5},
    "count": 16,
}
PROBE: Final = {
    "num_devices": 2,
    "memory_bytes": 8e9,
    "memory_bandwidth": 1e10,
    "link_bandwidth": 1e9,
    "link_latency_seconds": 1e-5,
    "peak_flops": {"float32": 1e11, "float64": 5e10},
}
COSTS: Final = dict.fromkeys((Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD), 0.001)


class Bench:
    """The sound originals, and a new name for each damaged copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = 0
        self.config = self.file("sound.toml", toml(sound_config(GPT)))
        self.run = _run_folder(folder / "sound-run")
        self.saved = _checkpoint_folder(folder / "sound-saved")

    def file(self, name: str, text: str | bytes) -> str:
        """A file in a folder of its own, deleted with the bench."""
        self._made += 1
        path = self.folder / str(self._made % 50) / name
        path.parent.mkdir(exist_ok=True)
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        path.write_bytes(data)
        return str(path)

    def copied(self, sound: Path) -> Path:
        """A copy of a folder, in place of the one before it."""
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        return copy


def sound_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A config that trains."""
    text = model["name"] in ("gpt", "llama", "hf")
    return {
        "model": dict(model),
        "data": {"name": "random", **({"seq_len": 8} if text else {})},
        "train": {"steps": 2, "global_batch": 8, "lr": 0.001, "optimizer": "adamw"},
        "plan": {"text": "dp1"},
        "cluster": {"name": "h100x8"},
    }


def _run_folder(run: Path) -> Path:
    """A run's folder, its trace drawn from the schedule."""
    run.mkdir()
    schedule = lower(make("1f1b", 2, 4))
    costs = {(kind, stage): cost for kind, cost in COSTS.items() for stage in (0, 1)}
    costs |= {(Kind.BACKWARD, stage): 2e-3 for stage in (0, 1)}
    steps = [simulated_step(schedule, costs).labelled(step=step) for step in (1, 2)]
    lines = [
        {"step": n, "loss": 2.0, "grad_norm": 1.0, "tokens": 64, "seconds": 0.1} for n in (1, 2)
    ]
    summary = {
        "steps": 2,
        "final_loss": 2.0,
        "tokens_per_second": 640.0,
        "traffic": {"pp": 1e6},
        "peak_memory": [3e8, 2e8],
        "state_memory": [{"parameters": 10, "optimizer": 20}] * 2,
    }
    (run / "config.toml").write_text(toml(sound_config(GPT)))
    (run / "plan.txt").write_text("pp2:1f1b mb4\n")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "trace.json").write_text(json.dumps(Timeline.merge(steps).to_chrome()))
    return run


def _checkpoint_folder(run: Path) -> Path:
    """A run's folder with one checkpoint."""
    tensors = {"param/a.weight": torch.zeros(4, 3), "param/a.bias": torch.ones(4)}
    shards = [Shard.whole(name, tensor) for name, tensor in tensors.items()]
    directory = run / "checkpoints" / "step-00000002"
    directory.parent.mkdir(parents=True)
    save(directory, shards, {"step": 2, "plan": "dp1"})
    return run
