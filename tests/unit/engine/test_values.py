"""Values that a model brings go to their places one at a time."""

import math
import warnings
import weakref

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.models.losses import cross_entropy

WIDTH = 64
LAYERS = 16


class LiveBytes(TorchDispatchMode):
    """The most bytes of float32 that lived at once, of tensors with more than one row."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            storage = made.untyped_storage()
            if storage.nbytes() > 4 * WIDTH and storage._cdata not in self._known:
                self._hold(storage)
        return made

    def _hold(self, storage):
        numel_bytes, key = storage.nbytes(), storage._cdata
        self._known.add(key)
        self.now += numel_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, numel_bytes)

    def _drop(self, key, numel_bytes):
        self._known.discard(key)
        self.now -= numel_bytes


def most_bytes(world):
    """Bytes of float32 that lived at once while a model with one trained layer was built."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    for layer in layers[:-1]:
        layer.weight.requires_grad_(False)
    before = [layer.weight.clone() for layer in layers]
    with LiveBytes() as live:
        plait.build(model, "dp1 precision:bf16", loss=cross_entropy, optimizer=AdamW, world=world)
    assert all(map(torch.equal, before, (layer.weight for layer in layers)))
    return live.most


def test_a_frozen_base_of_two_bytes_is_never_whole_in_four():
    (most,) = simulate(Mesh(), most_bytes)
    # One value on its way, and the trained layer's master weight and gradient.
    assert most <= 4 * 4 * WIDTH * WIDTH


def told_of(value: float, of_second: float) -> list[str]:
    """The warnings of two ranks whose models have a value in a weight and in a buffer."""

    def build(world):
        model = nn.BatchNorm1d(2)
        with torch.no_grad():
            for one in (model.weight, model.running_mean):
                one[0] = of_second if world.rank else value
        plait.build(model, "dp2", loss=cross_entropy, optimizer=AdamW, world=world)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        simulate(Mesh(dp=2), build)
    return [str(one.message) for one in told]


def test_a_value_that_is_no_number_is_the_same_on_all_ranks():
    assert told_of(math.nan, math.nan) == []
    (told,) = told_of(math.nan, 1.0)
    assert "rank 1 brought other initial values" in told
