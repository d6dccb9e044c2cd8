"""A multi-layer perceptron: the smallest model that every strategy can split.

Hidden layers are named `up` and `down` in turn, because a tensor-parallel pair is column, then row.
A name says which half a layer is. The last of an odd number has no partner and is named `linear`.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from plait.models.layers import check_positive

BLOCKS = "blocks.*"
CHAIN = (BLOCKS, "head")
ROLES = {
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.*.linear": "replicated",
    "head": "replicated",
}


def hidden_layer(
    name: str, in_features: int, out_features: int, *, dropout: float
) -> nn.Sequential:
    """Linear, ReLU, dropout: [..., in] -> [..., out]."""
    return nn.Sequential(
        OrderedDict(
            [
                (name, nn.Linear(in_features, out_features)),
                ("relu", nn.ReLU()),
                ("dropout", nn.Dropout(dropout)),
            ]
        )
    )


class MLP(nn.Module):
    """[B, in_features] -> [B, out_features] through `num_hidden_layers` hidden layers."""

    def __init__(
        self,
        *,
        in_features: int,
        hidden_size: int,
        num_hidden_layers: int,
        out_features: int,
        dropout: float = 0.0,
    ) -> None:
        """Make the layers.

        Args:
            in_features: of a sample.
            hidden_size: features of every hidden layer.
            num_hidden_layers: from 1.
            out_features: of the result.
            dropout: the rate behind each hidden layer.

        Raises:
            ModelError: a size below 1.
        """
        check_positive(in_features=in_features, hidden_size=hidden_size)
        check_positive(num_hidden_layers=num_hidden_layers, out_features=out_features)
        super().__init__()
        names = ["up", "down"] * (num_hidden_layers // 2) + ["linear"] * (num_hidden_layers % 2)
        widths = [in_features] + [hidden_size] * (num_hidden_layers - 1)
        self.blocks = nn.ModuleList(
            hidden_layer(name, width, hidden_size, dropout=dropout)
            for name, width in zip(names, widths, strict=True)
        )
        self.head = nn.Linear(hidden_size, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_features] -> [B, out_features]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)
