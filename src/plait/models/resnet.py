"""ResNet: basic blocks for depth 18 and 34, bottlenecks from 50 on.

He et al., "Deep Residual Learning for Image Recognition", table 1. The norm is by groups of 16
channels (Wu and He, "Group Normalization", table 3), not by batch. It has the same parameters, but
a sample's output does not depend on its neighbours. So any split of the batch computes what one
device computes. `norm = "batch"` gives the original.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from plait.errors import ModelError, nearest
from plait.models.layers import check_positive

BLOCKS = "blocks.*"
CHAIN = ("stem", BLOCKS, "pool", "head")
ROLES = {
    "stem.conv": "replicated",
    "stem.norm": "replicated",
    "blocks.*.conv1": "replicated",
    "blocks.*.norm1": "replicated",
    "blocks.*.conv2": "replicated",
    "blocks.*.norm2": "replicated",
    "blocks.*.conv3": "replicated",
    "blocks.*.norm3": "replicated",
    "blocks.*.shortcut.conv": "replicated",
    "blocks.*.shortcut.norm": "replicated",
    "head": "replicated",
}

LAYERS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    """Groups of 16 channels, or the next larger size that divides."""
    num_groups = next(
        groups for groups in range(max(1, channels // 16), 0, -1) if channels % groups == 0
    )
    return nn.GroupNorm(num_groups, channels)


NORMS: dict[str, Norm] = {"group": group_norm, "batch": nn.BatchNorm2d}


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size up to its stride; the norm after it has the bias."""
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


class Shortcut(nn.Module):
    """The residual path: nothing where the shape stays, else a strided 1 x 1 convolution (option B
    of the paper).
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        changes = stride != 1 or in_channels != out_channels
        self.conv = conv(in_channels, out_channels, 1, stride) if changes else nn.Identity()
        self.norm = norm(out_channels) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H/stride, W/stride]."""
        return self.norm(self.conv(x))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and the shortcut; figure 5, left."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(in_channels, width, 3, stride), norm(width)
        self.conv2, self.norm2 = conv(width, width, 3), norm(width)
        self.shortcut = Shortcut(in_channels, width, stride, norm)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, width, H/stride, W/stride]."""
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3 (which strides), 1 x 1 up to four times the width, and the shortcut; figure
    5, right.
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1, self.norm1 = conv(in_channels, width, 1), norm(width)
        self.conv2, self.norm2 = conv(width, width, 3, stride), norm(width)
        self.conv3, self.norm3 = conv(width, out_channels, 1), norm(out_channels)
        self.shortcut = Shortcut(in_channels, out_channels, stride, norm)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 4 width, H/stride, W/stride]."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        return self.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


class Stem(nn.Module):
    """7 x 7 convolution and 3 x 3 maximum, each of stride 2: [B, C, H, W] -> [B, width, H/4,
    W/4].
    """

    def __init__(self, in_channels: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.conv = conv(in_channels, width, 7, stride=2)
        self.norm = norm(width)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, width, H/4, W/4]."""
        return self.pool(self.relu(self.norm(self.conv(x))))


class ResNet(nn.Module):
    """Images [B, C, H, W] -> logits [B, num_classes]: the composition of `CHAIN`."""

    def __init__(
        self,
        *,
        depth: int = 18,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        norm: str = "group",
    ) -> None:
        """Make the modules.

        Args:
            depth: 18, 34, 50, 101 or 152.
            num_classes: of the logits.
            in_channels: of the images.
            width: channels of the stem and the first group; each later group has twice as many.
            norm: `group` (16 channels) or `batch`.

        Raises:
            ModelError: a size below 1, or an unknown depth or norm.
        """
        check_positive(num_classes=num_classes, in_channels=in_channels, width=width)
        if depth not in LAYERS:
            raise ModelError(
                f"there is no ResNet of depth {depth}; known: {', '.join(map(str, LAYERS))}"
            )
        if norm not in NORMS:
            raise ModelError(f"there is no norm {norm!r} for a ResNet; {nearest(norm, NORMS)}")
        super().__init__()
        block = BasicBlock if depth < 50 else Bottleneck
        self.stem = Stem(in_channels, width, NORMS[norm])
        self.blocks = nn.ModuleList()
        channels = width
        for group, num_blocks in enumerate(LAYERS[depth]):
            for index in range(num_blocks):
                stride = 2 if group > 0 and index == 0 else 1
                self.blocks.append(block(channels, width * 2**group, stride, NORMS[norm]))
                channels = width * 2**group * block.expansion
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, num_classes]."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x))
