"""The ways out of a model's forward, where a stage has computed its own part."""

from __future__ import annotations

from torch import nn

from plait.torch_internals import has_hooks_that_always_run


class StageDone(BaseException):
    """No error, and past `except Exception` of a model's code."""


class StageDoneForHooks(Exception):
    """No error, and seen by hooks that always run: torch calls them after an `Exception` alone."""


def way_out(model: nn.Module) -> type[BaseException]:
    """The exception that a stage of a model raises where its part is done."""
    return StageDoneForHooks if has_hooks_that_always_run(model) else StageDone
