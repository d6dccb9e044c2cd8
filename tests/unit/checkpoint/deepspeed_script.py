"""Two steps of DeepSpeed's ZeRO-3 on processors and a checkpoint, for torchrun."""

import sys

import deepspeed
import torch
from torch import nn

comm = sys.modules["deepspeed.comm.torch"]
comm.build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled first

torch.manual_seed(0)


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a buffer."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.ones(1))  # 0.19.8 cannot begin with a scalar
        self.register_buffer("shift", torch.tensor([0.5, 0.25, 0.125]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three numbers a row."""
        y: torch.Tensor = self.layers(x) * self.scale + self.shift
        return y


deepspeed.init_distributed(dist_backend="gloo")
engine = deepspeed.initialize(
    model=Net(),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    },
)[0]
for _ in range(2):
    engine.backward(engine(torch.ones(1, 5)).square().sum())
    engine.step()
engine.save_checkpoint(sys.argv[1], tag="step2")
