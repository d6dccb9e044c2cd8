"""Parameters with the names that they have in a model, as a list that any optimizer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn


class OnWhole(Protocol):
    """Applies functions of whole matrices to the parts of all ranks."""

    def apply(
        self, parts: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The parts of `function(matrix)`, by name, from those of the matrices, in the parts'
        shapes. Collective.
        """

    def restrict(self, wanted: Callable[[str], bool]) -> None:
        """Share only the matrices of these names among owners, where not all are ever given."""


class Parameters(list[nn.Parameter]):
    """The parameters that one rank's optimizer owns, as the user's `make_optimizer` gets them: a
    list.

    Under ZeRO they are one-dimensional parts of the model's parameters; `named` says of which.

    Attributes:
        whole: applies functions of whole matrices where ranks hold parts of them; else None.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
        whole: OnWhole | None = None,
    ) -> None:
        super().__init__(param for _, param in named)
        self._names = [name for name, _ in named]
        self._shapes = shapes or {}
        self.whole = whole

    def whole_shape(self, name: str, param: nn.Parameter) -> tuple[int, ...]:
        """The shape of the parameter in the model, of which `param` may be a part."""
        return tuple(self._shapes.get(name, param.shape))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name in the model, parameter) pairs, for parameter groups by name."""
        return list(zip(self._names, self, strict=True))
