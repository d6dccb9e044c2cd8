"""Factors that measured steps of one's own put on the planner's constants, with their uncertainty.

`plait calibrate` finds them and writes them into a cluster file as [calibration]; this room only
keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plait.cluster.bounds import Bounds
from plait.values import JsonMapping

FACTORS: Final = ("compute", "communication", "host")
_FACTOR: Final = Bounds(0.02, 50, "of the predicted seconds")
_SPREAD: Final = Bounds(0, 5, "as the standard deviation of a factor's logarithm")

CALIBRATION_BOUNDS: Final[Mapping[str, Bounds]] = {
    **{f"calibration.{name}": _FACTOR for name in FACTORS},
    **{f"calibration.{name}_sd": _SPREAD for name in FACTORS},
    "calibration.time_bar": Bounds(0.01, 10, "of the usual width of a time bar"),
    "calibration.runs": Bounds(1, 1_000_000, "measured steps", whole=True),
}
"""The keys of [calibration] of a cluster file."""


@dataclass(frozen=True)
class Calibration:
    """Seconds that were measured over seconds that were predicted, by cause.

    `time_bar` is the width of the time bars over the usual one. `runs` counts the measured steps.
    Each `*_sd` is the standard deviation of the logarithm of a factor.
    """

    compute: float = 1.0
    communication: float = 1.0
    host: float = 1.0
    compute_sd: float = 0.0
    communication_sd: float = 0.0
    host_sd: float = 0.0
    time_bar: float = 1.0
    runs: int = 1

    def as_dict(self) -> dict[str, float]:
        """The numbers by name, as in a cluster file."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def calibration_of(settings: JsonMapping) -> Calibration | None:
    """The calibration of the settings of a cluster file; None where it has none."""
    given = {
        key.removeprefix("calibration."): value
        for key, value in settings.items()
        if key.startswith("calibration.")
    }
    return Calibration(**given) if given else None
