"""The planner's numbers for the card at hand."""

from __future__ import annotations

import torch

import plait
from benchmarks.gpu.models import Subject
from plait.predict.cost.api import machine
from plait.predict.cost.memory.rules import DeviceMemory
from plait.predict.cost.records import Estimate
from plait.predict.cost.time.machine import Machine

PRESETS = ("gh200", "gb200", "gb300", "b300", "b200", "h200", "h800", "h20", "l40s", "a100-40gb")


def preset() -> str:
    """The preset of the card, by its name; H100 on a processor, for a trial."""
    if not torch.cuda.is_available():
        return "h100"
    name = torch.cuda.get_device_name(0).lower().replace(" ", "-")
    if "h100" in name:
        return "h100-pcie" if "pcie" in name else "h100"
    return next((one for one in PRESETS if one in name), "a100-80gb")


def card_machine() -> Machine:
    """The card as the cost model sees it."""
    return machine(f"{preset()}x1")


def estimated(subject: Subject) -> Estimate:
    """The step and the memory of a subject under plait."""
    return plait.estimate(subject.config(), "dp1 precision:bf16 compile", f"{preset()}x1")


def living_bytes(guess: Estimate) -> float:
    """What lives at the peak, as `max_memory_allocated` counts it: the total without what the
    allocator reserves beyond.
    """
    return guess.memory.total - DeviceMemory.fragmentation * guess.memory.activations
