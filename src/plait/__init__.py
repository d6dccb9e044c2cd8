"""plait: every way to parallelise training, woven into one run.

The door. Each name is imported when it is first used. So `import plait` takes milliseconds, and
only computing loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait import errors, verify
    from plait.batch_trees import SampleList
    from plait.cli.report import Report
    from plait.cluster import Cluster
    from plait.comm.world import World
    from plait.datasets.loader import Loader
    from plait.engine.averaged_weights import AveragedWeights
    from plait.engine.build import Options, build
    from plait.engine.engine import Engine
    from plait.engine.script import prepare
    from plait.engine.stages.cut import Cutting
    from plait.engine.step import StepResult
    from plait.engine.whole_tensors import WholeTensors
    from plait.launcher import launch
    from plait.plan import Plan
    from plait.predict.cost import estimate
    from plait.predict.planner.answers import choose
    from plait.predict.planner.result import search
    from plait.run.loop import fit

__all__ = [
    "AveragedWeights",
    "Cluster",
    "Cutting",
    "Engine",
    "Loader",
    "Options",
    "Plan",
    "Report",
    "SampleList",
    "StepResult",
    "WholeTensors",
    "World",
    "build",
    "choose",
    "errors",
    "estimate",
    "fit",
    "launch",
    "prepare",
    "search",
    "verify",
]

_ROOMS = {
    "AveragedWeights": "plait.engine.averaged_weights",
    "Cluster": "plait.cluster",
    "Cutting": "plait.engine.stages.cut",
    "Engine": "plait.engine.engine",
    "Loader": "plait.datasets.loader",
    "Options": "plait.engine.build",
    "Plan": "plait.plan",
    "Report": "plait.cli.report",
    "SampleList": "plait.batch_trees",
    "StepResult": "plait.engine.step",
    "WholeTensors": "plait.engine.whole_tensors",
    "World": "plait.comm.world",
    "build": "plait.engine.build",
    "choose": "plait.predict.planner",
    "errors": "plait.errors",
    "estimate": "plait.predict.cost",
    "fit": "plait.run.loop",
    "launch": "plait.launcher",
    "prepare": "plait.engine.script",
    "search": "plait.predict.planner.result",
    "verify": "plait.verify",
}


def __getattr__(name: str) -> object:
    """Import a name of the door from its room, once."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("plait")
    if name not in _ROOMS:
        raise AttributeError(f"module 'plait' has no attribute '{name}'")
    room = importlib.import_module(_ROOMS[name])
    value = room if _ROOMS[name] == f"plait.{name}" else getattr(room, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The door's names, for completion in an interpreter."""
    return sorted(__all__)
