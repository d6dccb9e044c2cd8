"""What the door and the rooms promise is there."""

from __future__ import annotations

import importlib

import pytest

import plait
import plait.predict.cost
from plait.context import HaloConv2d
from plait.cost import estimate
from plait.parallel.context import halo
from tests.architecture.source import files, module

DOOR = [
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


def test_the_door_is_what_it_was_agreed_to_be() -> None:
    assert sorted(plait.__all__) == DOOR
    assert dir(plait) == DOOR


@pytest.mark.parametrize("name", DOOR)
def test_every_name_of_the_door_opens(name: str) -> None:
    assert getattr(plait, name) is not None


def test_the_old_addresses_lead_to_the_same_things() -> None:
    assert estimate is plait.predict.cost.estimate
    assert HaloConv2d is halo.HaloConv2d


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paln'"):
        _ = plait.paln  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [module(path) for path in files() if path.name == "__init__.py"])
def test_every_room_has_what_it_exports(name: str) -> None:
    room = importlib.import_module(name)
    for exported in getattr(room, "__all__", []):
        assert hasattr(room, exported), f"{name}.__all__ names '{exported}', which is not there"
