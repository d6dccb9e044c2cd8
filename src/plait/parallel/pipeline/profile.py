"""The profile of a model's layers: forward and backward of each on an example, measured.

One layer at a time is in memory. The model's own forward runs, so a layer meets the inputs that it
will have. Values that are still on the meta device become zeros, which take as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from plait.forwards import with_forwards
from plait.parallel.pipeline.dataflow import glue_in_memory, in_memory
from plait.parallel.pipeline.kept_parameters import parameters_kept
from plait.parallel.pipeline.partition import LayerProfile
from plait.parallel.pipeline.side_effects import attributes_kept
from plait.torch_internals import no_dispatch_modes
from plait.values import PyTree

STATE_COPIES = 4  # of each trainable element: weight, gradient and the two moments of Adam


def profile_layers(
    model: nn.Module, names: Sequence[str], run: Callable[[], object], repeats: int = 3
) -> list[LayerProfile]:
    """The profiles of the layers `names`, in the order in which `run()` calls them.

    `run()` calls the model on an example. Seconds are the least of `repeats` passes. Bytes of state
    are those of Adam; bytes of activations are those that backward keeps.
    """
    profiles: list[LayerProfile] = []
    units = {name: model.get_submodule(name) for name in names}

    def weighed(name: str, module: nn.Module) -> Callable[..., object]:
        forward = module.forward

        def call(*args: object, **kwargs: object) -> PyTree:
            with in_memory(module), torch.enable_grad():
                work = _LayerCall(module, forward, args, kwargs)
                output, activation_bytes = work.kept()
                with no_dispatch_modes():  # one that has seen the first call would take time
                    seconds = min(work.seconds() for _ in range(max(1, repeats)))
            state = STATE_COPIES * sum(
                _num_bytes(param) for param in module.parameters() if param.requires_grad
            )
            output_bytes = sum(map(_num_bytes, _tensors(output)))
            profiles.append(LayerProfile(name, seconds, state, activation_bytes, output_bytes))
            return output

        return call

    with (
        attributes_kept(model),
        parameters_kept(model),
        with_forwards([(unit, weighed(name, unit)) for name, unit in units.items()]),
        glue_in_memory(model, units),
        torch.random.fork_rng(devices=[]),  # all ranks meet before any draws its start
        torch.no_grad(),
    ):
        run()
    return profiles


@dataclass
class _LayerCall:
    """One call of one layer, to be done several times."""

    module: nn.Module
    forward: Callable[..., PyTree]
    args: PyTree
    kwargs: PyTree

    def seconds(self) -> float:
        """Seconds of a forward and a backward."""
        args, kwargs = tree_map(_leaf, (self.args, self.kwargs))
        trained = [*self.module.parameters(), *_tensors((args, kwargs))]
        began = time.perf_counter()
        ends = [end for end in _tensors(self.forward(*args, **kwargs)) if end.requires_grad]
        wanted = [tensor for tensor in trained if tensor.requires_grad]
        if ends and wanted:
            torch.autograd.grad(
                ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True
            )
        return time.perf_counter() - began

    def kept(self) -> tuple[object, float]:
        """(copy of the output, bytes that backward would need of this call, beside parameters)."""
        parameters = {param.untyped_storage().data_ptr() for param in self.module.parameters()}
        saved_bytes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved_bytes[storage.data_ptr()] = storage.nbytes()
            return tensor

        args, kwargs = tree_map(_leaf, (self.args, self.kwargs))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self.forward(*args, **kwargs)
        copies = tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, output
        )
        return copies, float(sum(saved_bytes.values()))


def _leaf(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _tensors(value: object) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
