"""Parameters with the names that they have in a model, as a list that any optimizer takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class Parameters(list[nn.Parameter]):
    """The parameters that one rank's optimizer owns, as the user's `make_optimizer` gets them: a
    list.

    Under ZeRO they are one-dimensional parts of the model's parameters; `named` says of which.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__(param for _, param in named)
        self._names = [name for name, _ in named]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name in the model, parameter) pairs, for parameter groups by name."""
        return list(zip(self._names, self, strict=True))
