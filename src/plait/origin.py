"""Where an error came from: the module of the model, and the line of the user's own code."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from plait.errors import ModelError

PLAIT = Path(__file__).parents[1]
LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{PLAIT}/")
ONE_VALUE = "Expected more than 1 value per channel"


@dataclass(frozen=True)
class Line:
    """A line of code."""

    file: str
    number: int

    @property
    def code(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def module_of(model: nn.Module, error: BaseException) -> str | None:
    """The innermost module of the model whose code an error has come through ("" is the model
    itself), or None.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame in _frames(error):
        found = names.get(id(frame.tb_frame.f_locals.get("self")), found)
    return found


def named(name: str | None) -> str:
    """A module in a sentence."""
    return f"'{name}'" if name else "the model"


def line_of(error: BaseException) -> Line | None:
    """The innermost line that is neither torch's nor plait's."""
    found = None
    for frame in _frames(error):
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<")):
            found = Line(file, frame.tb_lineno)
    return found


def _frames(error: BaseException) -> Iterator[TracebackType]:
    frame = error.__traceback__
    while frame is not None:
        yield frame
        frame = frame.tb_next


def batch_norm_error(model: nn.Module) -> Callable[[Exception], ModelError | None]:
    """Explains the error of a batch norm that gets one value a channel, whose variance is
    undefined.
    """

    def explain(error: Exception) -> ModelError | None:
        if not (isinstance(error, ValueError) and str(error).startswith(ONE_VALUE)):
            return None
        name = module_of(model, error)
        kind = "batch norm" if not name else type(model.get_submodule(name)).__name__
        shape = str(error).partition("torch.Size(")[2].rstrip(")")
        return ModelError(
            f"{named(name)} ({kind}) gets one value a channel, inputs of shape {shape}, and a "
            "batch norm takes its statistics over the samples of a slice (a micro-batch of a data "
            "rank): give each slice 2 samples or more, by a larger global_batch, a smaller mb or "
            "dp, or a larger example; or take a norm of single samples (group, layer)"
        )

    return explain
