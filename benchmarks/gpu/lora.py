"""Llama 8B with adapters of rank 16 on every linear layer of a block, frozen base in bf16.

NVIDIA NeMo Automodel publishes 402 TFLOP/s for it on an H100 (docs/performance-summary.mdx, commit
36044ad), with 2 x 4,096 tokens a micro-batch. Its formula (`llama3_flops`, recipes/llm/benchmark)
counts 6 flops a weight and token and the causal half of attention. That is multiplied by
(2 + trained / frozen) / 3, as frozen weights have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu import turns
from benchmarks.gpu.child import Turn
from benchmarks.gpu.measuring import Build, get_ready
from benchmarks.gpu.models import LORA, Subject
from benchmarks.gpu.record import say
from benchmarks.gpu.steps import (
    adapter_numbers,
    own_adapter_steps,
    peft_steps,
    plait_steps,
)

PUBLISHED = 402.0


def _counted(build: Build) -> Build:
    """The system, its flops by Automodel's formula."""

    def built(subject: Subject, device: str) -> Any:
        steps = build(subject, device)
        trained, frozen = adapter_numbers(subject)
        steps.flops *= (2 + trained / frozen) / 3
        return steps

    return built


SYSTEMS: dict[str, Build] = {
    "plait": _counted(plait_steps),
    "by hand, own adapters": _counted(own_adapter_steps),
    "by hand, PEFT": _counted(peft_steps),
}


def prepare(device: str, number: str) -> dict[str, str]:
    """Compile."""
    return get_ready(_system(number), _subject(device), device)


def measure(turn: Turn, number: str) -> None:
    """The row of one system, and those of the systems before it.

    Each has its process: torch.compile leaves out a function for good once it broke a graph there,
    and the systems share the functions of the model.
    """
    subject = _subject(turn.device)
    trained, frozen = adapter_numbers(subject)
    say(
        f"\nadapters of rank {subject.rank}: {trained / 1e6:.1f} M trained, {frozen / 1e9:.2f} G "
        f"frozen; TFLOP/s as Automodel counts, whose H100 has {PUBLISHED:.0f}"
    )

    def after(name: str, step: Callable[[], Any]) -> None:
        """Nothing is profiled."""

    turns.compare(turn, subject, _system(number), after)


def _system(number: str) -> dict[str, Build]:
    return dict([list(SYSTEMS.items())[int(number)]])


def _subject(device: str) -> Subject:
    return LORA if device == "cuda" else LORA.small()
