"""A U-Net learns a partial differential equation: model parallel over channels and over space, with
halo exchange.

`python examples/simulation.py [--small]`. The equation is Allen-Cahn's, du/dt = eps^2 (u_xx + u_yy)
+ u - u^3 on a periodic square; a spectral solver here makes the data (exact diffusion in Fourier
space, the reaction's exact solution in between: Strang splitting). The net maps u(t) to u(t + 1).
Under `dp2 tp2` the data axis is used for space: its two ranks hold the upper and the lower half of
every field, and convolutions borrow rows from the other (`plait.parallel.context.HaloConv2d`); the
tensor axis cuts the channels inside every block. The reference is plain PyTorch on whole fields.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Task, equal, options, show
from torch import Tensor, nn

import plait
from plait.parallel.context import HaloConv2d

ROLES = {
    "lift": "replicated",
    "*.conv": "replicated",
    "*.norm": "replicated",
    "*.up": "column",
    "*.down": "row",
    "head": "replicated",
}
PLAN = "dp2 tp2 precision:float64"


class Block(nn.Module):
    """Mix over space (a convolution of each channel), then over channels (two linear layers, which
    the tensor axis cuts).
    """

    def __init__(self, channels: int, axis: Any) -> None:
        super().__init__()
        self.conv = HaloConv2d(channels, channels, 5, axis=axis, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """[B, 1, H, W] -> [B, 1, H, W]: two levels; where space is cut, every rank pools and repeats
    its own rows.
    """

    def __init__(self, channels: int, axis: Any = None) -> None:
        super().__init__()
        self.lift = HaloConv2d(1, channels, 3, axis=axis)
        self.fine, self.coarse, self.last = (Block(channels, axis) for _ in range(3))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, u: Tensor) -> Tensor:
        """The change of u."""
        x = self.fine(self.lift(u))
        y = self.coarse(F.avg_pool2d(x, 2)).repeat_interleave(2, -1).repeat_interleave(2, -2)
        return u + self.head(self.last(x + y))


def solve(u: Tensor, time: float, eps: float = 0.05, steps: int = 20) -> Tensor:
    """u [B, 1, N, N] on the unit square, `time` later."""
    dt = time / steps
    n = u.shape[-1]
    k = 2 * torch.pi * torch.fft.fftfreq(n, 1 / n, dtype=u.dtype)
    decay = torch.exp(-(eps**2) * (k[:, None] ** 2 + k[None, :] ** 2) * dt)
    half = math.exp(
        -dt
    )  # of u / sqrt(u^2 + (1 - u^2) e^(-2 t)), what the reaction makes of u, at t = dt / 2
    for _ in range(steps):
        u = u / torch.sqrt(u**2 + (1 - u**2) * half)
        u = torch.fft.ifft2(torch.fft.fft2(u) * decay).real
        u = u / torch.sqrt(u**2 + (1 - u**2) * half)
    return u


def batch(samples: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    """Random smooth fields, and the same one unit of time later."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(samples, 1, size, size, generator=generator, dtype=torch.float64)
    k = torch.fft.fftfreq(size, 1 / size, dtype=torch.float64)
    smooth = torch.exp(-0.1 * (k[:, None] ** 2 + k[None, :] ** 2))
    u = torch.fft.ifft2(torch.fft.fft2(noise) * smooth).real
    u = u / u.abs().amax((-2, -1), keepdim=True)
    return u, solve(u, 1.0)


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over all points, so that strips of any height weigh as they should."""
    return (output - target).square().sum(), torch.tensor(float(target.numel()))


def make(channels: int, axis: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return UNet(channels, axis).double()


def plain(task: Task, channels: int) -> list[float]:
    """One device, whole fields."""
    model = make(channels)
    losses = []
    optimizer = task.optimizer(model.parameters())
    for step in range(task.steps):
        inputs, targets = task.batch(step)
        total, count = squared_error(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    return losses


def in_strips(task: Task, channels: int) -> list[float]:
    """This rank's part: half of every field, half of the channels inside the blocks."""
    from plait.engine.build import Options, join_world

    world = join_world(plait.Plan.parse(PLAN))
    space = world.axis("dp")
    model = make(channels, space)
    engine = plait.build(
        model,
        PLAN,
        loss=squared_error,
        optimizer=task.optimizer,
        options=Options(roles=ROLES),
        world=world,
    )
    losses = []
    for step in range(task.steps):
        inputs, targets = (
            field.chunk(space.size, -2)[space.rank].contiguous() for field in task.batch(step)
        )
        losses.append(engine.step((inputs, targets), trace=False).loss)
    world.close()
    return losses


def main() -> int:
    given = options()
    channels, samples, size, steps = (8, 2, 16, 6) if given.small else (16, 8, 32, 150)
    task = Task(partial(make, channels), partial(batch, samples, size), squared_error, steps)
    truth = plain(task, channels)
    found = plait.launch(in_strips, task, channels, nproc=4)[0]
    show(
        "simulation",
        {"one device, whole fields": truth, "two strips x half the channels": found},
        given.out,
    )
    print(f"largest difference {equal(found, truth, 1e-9):.1e}")
    assert given.small or truth[-1] < truth[0] / 20, "it has not learnt"
    return 0


if __name__ == "__main__":
    sys.exit(main())
