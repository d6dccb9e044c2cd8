"""The reference's optimizer: of the class and with the settings that the watched one had."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from plait.errors import ConfigError
from plait.models.parameters import Parameters
from plait.verify.outside.watch import Settings

PLAIN = {"foreach": False, "fused": False, "capturable": False}
"""Settings that choose a kernel and no mathematics."""


def _top_rate(steps: Sequence[Mapping[str, Settings]], name: str) -> float:
    """The largest learning rate of a parameter over the steps that have it."""
    return max(float(step[name]["lr"]) for step in steps if name in step)


def maker(
    kind: type[Optimizer], steps: Sequence[Mapping[str, Settings]], names: Sequence[str]
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """A function of the parameters, in the order of `names`, with the settings of the first step.

    Its rate is the largest of the run, so that a rate of one step is a factor of it. Parameters
    without settings take those of the first that has some.
    """
    first = dict(steps[0])
    rated = [name for name, settings in first.items() if "lr" in settings]
    top = {name: _top_rate(steps, name) for name in rated}

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        groups: list[dict[str, Any]] = []
        known_names = params.named() if isinstance(params, Parameters) else None
        for name, parameter in known_names or zip(names, params, strict=True):
            known = first.get(name) or next(iter(first.values()))
            settings = {**known, **{key: PLAIN[key] for key in PLAIN if key in known}}
            settings.pop("initial_lr", None)
            if name in top:
                settings["lr"] = top[name]
            same = [one for one in groups if _settings(one) == settings]
            if same:
                same[0]["params"].append(parameter)
            else:
                groups.append({**settings, "params": [parameter]})
        return _made(kind, groups)

    return make


def factors(steps: Sequence[Mapping[str, Settings]]) -> list[float]:
    """The rate of each step over the largest rate, of the first parameter."""
    name = next(iter(steps[0]))
    rates = [float(step.get(name, {}).get("lr", 1.0)) for step in steps]
    largest = max(rates) or 1.0
    return [rate / largest for rate in rates]


def _settings(group: Mapping[str, Any]) -> Settings:
    return {key: value for key, value in group.items() if key != "params"}


def _made(kind: type[Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of these groups; its constructor may need some of their settings by name."""
    wanted = inspect.signature(kind).parameters
    needed = {
        name: groups[0][name]
        for name, parameter in wanted.items()
        if parameter.default is inspect.Parameter.empty and name in groups[0] and name != "params"
    }
    try:
        return kind(groups, **needed)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer {kind.__name__} cannot be made again for the reference ({error}); "
            "write reference_step(number) and parallel_step(number) instead"
        ) from error
