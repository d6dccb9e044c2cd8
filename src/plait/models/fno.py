"""A Fourier neural operator: fields on a periodic square in, fields out, at any resolution.

The convolution over space multiplies the lowest modes of the Fourier transform by learnt matrices
(Z. Li et al., Fourier Neural Operator for Parametric Partial Differential Equations, ICLR 2021,
section 4). A layer is that of the factorized operators, which stay stable when there are many: x +
feed-forward(convolution(x)) (A. Tran et al., Factorized Fourier Neural Operators, ICLR 2023,
equation 10). Channels stand last, as in a transformer, so that a tensor axis cuts the feed-forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.layers import check_positive
from plait.models.losses import widen

BLOCKS = "blocks.*"
CHAIN = ("lift", BLOCKS, "project")
ROLES = {
    "lift.linear": "replicated",
    "blocks.*.convolution": "replicated",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "project.linear": "replicated",
}


class Lift(nn.Module):
    """Channels to features, at every point: [B, in, H, W] -> [B, H, W, D]."""

    def __init__(self, in_channels: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, H, W, D]: channels are moved to the end."""
        return self.linear(x.permute(0, 2, 3, 1))


class SpectralConvolution(nn.Module):
    """A convolution with a kernel as wide as the field: [B, H, W, D] -> the same.

    A real field has H x (W / 2 + 1) modes. The `modes` lowest along W, and the `modes` lowest of
    either sign along H, meet a D x D matrix each. Others are dropped. `weight` [2 modes, modes, D,
    D, 2] has real and imaginary parts.
    """

    def __init__(self, hidden_size: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.empty(2 * modes, modes, hidden_size, hidden_size, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, so that a field keeps its scale."""
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] -> [B, H, W, D], computed in float32 at least.

        Raises:
            ModelError: more modes than the field has.
        """
        height, width = x.shape[1:3]
        if 2 * self.modes > height or self.modes > width // 2 + 1:
            raise ModelError(
                f"modes = {self.modes} is too many for a field of {height} x {width} points"
            )
        given = torch.fft.rfft2(widen(x), dim=(1, 2), norm="ortho")
        low = torch.cat(
            [given[:, : self.modes, : self.modes], given[:, -self.modes :, : self.modes]], 1
        )
        mixed = torch.einsum("bhwi,hwio->bhwo", low, torch.view_as_complex(widen(self.weight)))
        made = F.pad(mixed, (0, 0, 0, given.shape[2] - self.modes))
        gap = made.new_zeros(len(made), height - 2 * self.modes, *made.shape[2:])
        whole = torch.cat([made[:, : self.modes], gap, made[:, self.modes :]], 1)
        return torch.fft.irfft2(whole, s=(height, width), dim=(1, 2), norm="ortho").to(x.dtype)


class FNOBlock(nn.Module):
    """Mix over space, then over features: [B, H, W, D] -> the same."""

    def __init__(self, hidden_size: int, modes: int) -> None:
        super().__init__()
        self.convolution = SpectralConvolution(hidden_size, modes)
        self.up, self.down = (
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.Linear(4 * hidden_size, hidden_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] -> [B, H, W, D]: x and what is added to it (Tran et al. 2023,
        equation 10).
        """
        return x + self.down(F.gelu(self.up(self.convolution(x))))


class Project(nn.Module):
    """Features to channels, at every point: [B, H, W, D] -> [B, out, H, W]."""

    def __init__(self, hidden_size: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] -> [B, out, H, W]: channels are moved back to the front."""
        return self.linear(x).permute(0, 3, 1, 2)


class FNO(nn.Module):
    """[B, in_channels, H, W] -> [B, out_channels, H, W] through `num_hidden_layers` blocks."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_hidden_layers: int,
        modes: int,
        in_channels: int = 1,
        out_channels: int = 1,
    ) -> None:
        """Make the modules.

        Args:
            hidden_size: D, the features at each point.
            num_hidden_layers: the number of blocks.
            modes: the lowest modes that are kept along each side; at most H / 2 and W / 2 + 1.
            in_channels: of the field that comes.
            out_channels: of the field that goes.

        Raises:
            ModelError: a size below 1.
        """
        check_positive(hidden_size=hidden_size, num_hidden_layers=num_hidden_layers, modes=modes)
        check_positive(in_channels=in_channels, out_channels=out_channels)
        super().__init__()
        self.lift = Lift(in_channels, hidden_size)
        self.blocks = nn.ModuleList(FNOBlock(hidden_size, modes) for _ in range(num_hidden_layers))
        self.project = Project(hidden_size, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, H, W] -> [B, out_channels, H, W]: the field that follows from the field
        x.
        """
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.project(x)
