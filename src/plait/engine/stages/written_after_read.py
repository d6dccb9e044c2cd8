"""An error where a forward reads a parameter of another stage, and writes into one of its own.

MoCo's second encoder follows the first one so, in the forward of the model. The rank of the second
has zeros in the place of the first, and would move towards them.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from plait.engine.norms_of_parameters import changed, norms_of
from plait.errors import ModelError
from plait.parallel.data.absent import Absent
from plait.torch_internals import storage_of

COMPARED: Final = 2
"""How many forwards are compared by the norms of parameters, which `.data` does not hide."""


class WrittenAfterRead:
    """The frozen parameters of a rank, and the first read of one of another rank, in a forward.

    Only frozen ones are looked at: an optimizer moves the others.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._left = COMPARED
        self._norms: dict[str, Tensor] = {}
        self._read = ""
        self._before: dict[str, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """A forward of a stage begins."""
        self._forget()
        if self._left:
            self._left -= 1
            self._norms = norms_of(self._frozen())

    def read(self, name: str, place: str, param: Tensor) -> None:
        """Note that the forward reads a parameter [...] that is in `place`."""
        if not self._read:
            self._read = f"'{name}' {list(param.shape)} in {place}"
            # A second tensor of the memory keeps it from being used again.
            self._before = {key: (own.data, own._version) for key, own in self._frozen().items()}

    def end(self) -> None:
        """The forward has ended. Errors: `ModelError`."""
        if self._read:
            written = self._written()
            if written:
                raise ModelError(
                    f"the forward writes into the parameter '{written[0]}' of this rank, and reads "
                    f"the parameter {self._read}, of which this rank has zeros; a network that "
                    "follows another one, as in MoCo, must do so before the forward calls it, and "
                    "be whole in one stage: name its first module in Options(cutting=Cutting("
                    "splits=...)); or take pp out of the plan: dp and zero train such a model"
                )
        self._forget()

    def _forget(self) -> None:
        self._read = ""
        self._before = {}
        self._norms = {}

    def _frozen(self) -> dict[str, nn.Parameter]:
        """The frozen parameters that have numbers here."""
        return {
            name: param
            for name, param in self._model.named_parameters()
            if not param.requires_grad and not isinstance(param, Absent)
        }

    def _written(self) -> list[str]:
        """The names of parameters that are not as they were."""
        frozen = self._frozen()
        moved = changed(
            self._norms,
            norms_of({name: param for name, param in frozen.items() if name in self._norms}),
        )
        return [
            name
            for name, param in frozen.items()
            if name in moved or (name in self._before and not _is(param, *self._before[name]))
        ]


def _is(param: Tensor, memory: Tensor, version: int) -> bool:
    """Whether a parameter [...] has the memory and the version of before."""
    return param._version == version and storage_of(param) == storage_of(memory)
