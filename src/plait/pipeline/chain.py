"""Stages of a model that is a chain: modules of which each takes what the one before returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from plait.pipeline.payload import Payload, pack, unpack
from plait.pipeline.stage import StageModule


class WholeModel(StageModule):
    """The only stage: the model as it is. `call(model, inputs)` runs it."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> None:
        self._model, self._call = model, call

    def forward(self, inputs: Any, received: Payload | None) -> Any:
        return self._call(self._model, inputs)


class ChainStage(StageModule):
    """A run of links. `call(link, inputs)` runs the first link of the model on the model's inputs."""

    def __init__(self, links: Sequence[tuple[str, nn.Module]], call: Callable[[nn.Module, Any], Any], *, last: bool) -> None:
        self._links, self._call, self._last = list(links), call, last

    def forward(self, inputs: Any, received: Payload | None) -> Any:
        links = iter(self._links)
        if received is None:
            value = self._call(next(links)[1], inputs)
        else:
            received.restore()
            value = unpack(received)
        for _, link in links:
            value = link(value)
        return value if self._last else pack(value, f"'{self._links[-1][0]}'")
