"""A warning where a forward computes a buffer from its samples, and data ranks have other samples.

The centre of DINO, a codebook of moving means and running statistics of one's own are such buffers.
Each rank computes its own, and no gradient makes them equal. Batch norms do so by custom, and
`nn.SyncBatchNorm` exchanges its sums, so they are not told.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from plait.comm import World
from plait.engine.axes import data_axis
from plait.engine.loss_modules import LossModules
from plait.engine.norms_of_parameters import changed, norms_of
from plait.engine.state.local_parameters import LocalParameters
from plait.errors import some_of
from plait.mesh import AxisName

Measure = tuple[float, float]
"""The norm of a buffer, and its product with fixed numbers."""
ROUNDINGS = 16
"""How many roundings of a buffer's type apart two ranks still agree."""


class ComputedBuffers:
    """Compares the buffers that the first step has changed, before the second.

    A caller that averages them between two steps is then not warned.
    """

    def __init__(
        self,
        holding: LocalParameters,
        loss_modules: LossModules,
        world: World,
        *,
        together: bool,
    ) -> None:
        """`together`: all data ranks take part in every step."""
        self._holding = holding
        self._loss_modules = loss_modules
        self._axis = data_axis(world)
        self._tells = self._axis.rank == 0 and world.axis("tp").rank == 0
        self._left = 2 if together and self._axis.size > 1 else 0
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._norms: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Look at the buffers before a step. Collective before the second."""
        if not self._left:
            return
        self._left -= 1
        buffers = self._buffers()
        if self._left:
            self._before = {name: (one, one._version) for name, one in buffers.items()}
            self._norms = norms_of(buffers)
            return
        before, self._before = self._before, {}
        norms, self._norms = self._norms, {}
        if not buffers:
            return
        written = changed(norms, norms_of(buffers))  # by `.data`, which counts no version
        own = {
            name: _measure(buffer)
            for name, buffer in buffers.items()
            if name in written or name not in before or not _is(buffer, before[name])
        }
        different = _different(self._axis.gather_objects(own), buffers)
        if different and self._tells:
            parts = tuple(self._axis.name.split("*"))
            _warn(different, parts[0] if len(parts) == 1 else parts)

    def _buffers(self) -> dict[str, Tensor]:
        """The floating-point buffers of the model here and of the loss, but running statistics."""
        norms = {
            f"{name}.{key}"
            for name, module in self._holding.model.named_modules()
            if isinstance(module, _NormBase)
            for key in module._buffers
        }
        return {
            name: buffer
            for name, buffer in (self._loss_modules.buffers() | self._holding.buffers()).items()
            if name not in norms and buffer.is_floating_point() and buffer.numel()
        }


def _is(buffer: Tensor, before: tuple[Tensor, int]) -> bool:
    """Whether a buffer [...] is the tensor of before, into which nothing was written since."""
    tensor, version = before
    return buffer is tensor and buffer._version == version


@torch.no_grad()
def _measure(buffer: Tensor) -> Measure:
    values = buffer.detach().reshape(-1).double()
    numbers = torch.arange(1, values.numel() + 1, device=values.device).double().sin()
    return float(values.norm()), float(values @ numbers)


def _different(of_ranks: list[dict[str, Measure]], buffers: dict[str, Tensor]) -> list[str]:
    """The names of buffers that are not alike on all ranks."""
    names = {name for one in of_ranks for name in one}
    found = []
    for name in sorted(names):
        measures = [one[name] for one in of_ranks if name in one]
        norms, products = zip(*measures, strict=True)
        dtype = buffers[name].dtype if name in buffers else torch.float32
        room = ROUNDINGS * torch.finfo(dtype).eps * max(norms)
        apart = max(max(one) - min(one) for one in (norms, products))
        if len(measures) < len(of_ranks) or apart > room:
            found.append(name)
    return found


def _warn(names: list[str], axis: AxisName) -> None:
    warnings.warn(
        "the forward computes buffers from its samples, and data ranks have other values of "
        f"{some_of(map(repr, names))}; each rank goes on with its own, unlike one device: average "
        f"a mean between two steps, by engine.world.axis({axis!r}).all_reduce(buffer).wait() and "
        "division by its size; a queue of samples, as MoCo's, is no mean: let each forward put "
        "the samples of all ranks into it, by all_gather(all_samples, own_samples).wait() of the "
        "same axis",
        stacklevel=2,
    )
