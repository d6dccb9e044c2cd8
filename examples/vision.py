"""A ResNet on handwritten digits, data parallel with ZeRO: `python examples/vision.py [--small]`.
The digits come with scikit-learn: pip install 'plait[digits]'.

Its reference is the same training in plain PyTorch on one device; the curves must be one. In
float64: in float32 the last bit has become a hundredth of the loss after sixty steps of a ResNet.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from common import Task, equal, options, parallel, plain, show

import plait


def model(width: int) -> Any:
    from plait import models

    return models.make("resnet", depth=18, num_classes=10, in_channels=1, width=width).double()


def batch(samples: int, step: int) -> tuple[Any, Any]:
    """Digits in an order of their own, the same on every rank."""
    from plait import datasets

    digits = datasets.make(
        {"name": "digits"}, {"name": "resnet", "in_channels": 1, "num_classes": 10}
    )
    loader = datasets.Loader(digits, samples, seed=step)
    images, labels = next(loader)
    return images.double(), labels


def main() -> int:
    given = options()
    width, samples, steps = (4, 16, 6) if given.small else (8, 64, 150)
    from plait.models.losses import cross_entropy

    task = Task(partial(model, width), partial(batch, samples), cross_entropy, steps)
    plan = f"{'dp2:zero1' if given.small else 'dp4:zero2 mb2'} precision:float64"
    truth = plain(task)
    found = plait.launch(parallel, task, plan, nproc=plait.Plan.parse(plan).world_size)[0]
    show("vision", {"one device, plain PyTorch": truth, plan: found}, given.out)
    print(f"largest difference {equal(found, truth, 1e-8):.1e}")
    assert given.small or sum(truth[-20:]) / 20 < truth[0] / 2, "it has not learnt"
    return 0


if __name__ == "__main__":
    sys.exit(main())
