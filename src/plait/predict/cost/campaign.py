"""A whole training run of a plan: days, money, energy, and the useful time when devices fail.

Failures are Poisson, and every one takes all ranks back to the last state that was kept. State is
kept every t seconds and costs d, a restart takes r, and some device fails every m seconds. A run
then takes m exp(r/m) (exp((t+d)/m) - 1) / t of its time without failures. The best t is
sqrt(2 d m) (1 + sqrt(d/2m)/3 + d/18m) - d, and m where d is 2m or more (Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

from plait.errors import ConfigError
from plait.predict.cost.records import Estimate
from plait.values import JsonMapping, JsonObject

STORAGE_BANDWIDTH: Final = 1e9
"""Bytes a second to storage from a node: 2 TB/s for the 16,000 devices of "The Llama 3 Herd of
Models" (section 3.3.1), 2,000 nodes.
"""
RESTART_SECONDS: Final = 600.0
"""Seconds until ranks that were started again compute: below ten minutes to find the failure
and test the nodes (Jiang et al., "MegaScale", 2024).
"""
REJOIN_SECONDS: Final = 60.0
"""Seconds until ranks that kept their snapshots compute again with a spare one; an assumption."""
SHORTEST_SECONDS: Final = 1e-6
LEAST_USEFUL: Final = 1e-6
"""A smaller part of useful time counts as none."""
MOST_TOKENS: Final = 1e18
"""More tokens are taken for a slip; the largest published runs have less than 1e14."""
LEAST_MTBF: Final = 1e-4
MOST_MTBF: Final = 1e12
"""Hours between failures of a device; others are taken for a slip."""
DAY: Final = 86400.0
KEEPING_KEYS: Final = ("copy_bytes_per_second", "write_bytes_per_second", "recovery_seconds")


@dataclass(frozen=True)
class MeasuredCosts:
    """The cost of keeping state as a run has measured it, in seconds; None for what it has not.

    Attributes:
        snapshot: that a step waits for one; `checkpoint` likewise.
        rejoin: from the loss of a rank to the next finished step, from a snapshot.
        restart: the same, from a checkpoint.
    """

    snapshot: float | None = None
    checkpoint: float | None = None
    rejoin: float | None = None
    restart: float | None = None

    @staticmethod
    def of(summary: JsonMapping) -> MeasuredCosts:
        """The costs in the `summary.json` of a run."""
        recoveries = summary.get("recoveries", [])
        return MeasuredCosts(
            _each(summary.get("snapshots", {})),
            _each(summary.get("checkpoints", {})),
            _middle(recoveries, ("snapshot", "replica")),
            _middle(recoveries, ("checkpoint",)),
        )

    def of_estimate(self, estimate: Estimate) -> MeasuredCosts:
        """The costs for a plan: seconds of a run are taken as they are."""
        return self

    @property
    def names(self) -> list[str]:
        """The names of what was measured."""
        return [name for name in self.__dataclass_fields__ if getattr(self, name) is not None]


@dataclass(frozen=True)
class KeepingRates:
    """The rates at which a machine keeps state, as `plait probe` has measured them.

    Attributes:
        copy: bytes a second of one rank into memory of the host.
        write: bytes a second of all ranks together to the disk; None where it is not known.
        recovery: seconds to recover a rank of a tiny model; None where it is not known.
    """

    copy: float
    write: float | None
    recovery: float | None = None

    @staticmethod
    def of_probe(probe: JsonMapping) -> KeepingRates | None:
        """The rates in a probe file; None for one that has none, or damaged ones."""
        found = probe.get("keeping")
        if not isinstance(found, dict):
            return None
        copy, write, recovery = map(found.get, KEEPING_KEYS)
        if not _is_positive(copy):
            return None
        return KeepingRates(
            copy,
            write if _is_positive(write) else None,
            recovery if _is_positive(recovery) else None,
        )

    def of_estimate(self, estimate: Estimate) -> MeasuredCosts:
        """The costs for a plan, by the bytes of its state. One machine writes all of them.

        A recovery takes the seconds of a tiny model's, one copy of the snapshot, and a step.
        Restarts from a checkpoint stay assumed.
        """
        snapshot = estimate.state_bytes / estimate.num_devices / self.copy
        write = None if self.write is None else estimate.state_bytes / self.write
        rejoin = None
        if self.recovery is not None:
            rejoin = self.recovery + snapshot + estimate.step_seconds
        return MeasuredCosts(snapshot, write, rejoin)


def _is_positive(number: object) -> TypeGuard[float]:
    return isinstance(number, int | float) and math.isfinite(number) and number > 0


def _each(cost: JsonMapping) -> float | None:
    return float(cost["seconds"]) / cost["count"] if cost.get("count") else None


def _middle(recoveries: Sequence[JsonMapping], sources: Sequence[str]) -> float | None:
    """The median seconds of the recoveries from these sources that came to a step."""
    known = [
        float(one["seconds"])
        for one in recoveries
        if one.get("source") in sources and one.get("seconds") is not None
    ]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Keeping:
    """State that is kept every so often: seconds of one, of a restart from it, and what is best."""

    seconds: float
    restart_seconds: float
    interval_seconds: float
    interval_steps: int
    useful_fraction: float

    def as_dict(self) -> JsonObject:
        """The numbers by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def best_interval(seconds: float, failure_seconds: float) -> float:
    """Seconds of work between two states kept, each of which takes `seconds`."""
    if seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = seconds / (2 * failure_seconds)
    first = math.sqrt(2 * seconds * failure_seconds)
    return max(first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - seconds, 0.0)


def useful_fraction(
    interval: float, seconds: float, restart_seconds: float, failure_seconds: float
) -> float:
    """The part of the time that is training which is never repeated."""
    exponent = (interval + seconds) / failure_seconds
    if exponent + restart_seconds / failure_seconds > 600:
        return 0.0
    lost = math.exp(restart_seconds / failure_seconds) * math.expm1(exponent)
    return interval / (failure_seconds * lost)


def keeping(
    estimate: Estimate, seconds: float, restart_seconds: float, failure_seconds: float
) -> Keeping:
    """The best way to keep state, in whole steps."""
    step = estimate.step_seconds
    steps = max(1, round(best_interval(seconds, failure_seconds) / step))
    fraction = useful_fraction(steps * step, seconds, restart_seconds, failure_seconds)
    return Keeping(seconds, restart_seconds, steps * step, steps, fraction)


def goodput(
    estimate: Estimate, mtbf_hours: float, costs: MeasuredCosts | KeepingRates | None = None
) -> JsonObject:
    """The cost of failures for a run whose devices each fail once in `mtbf_hours`. State is kept in
    the memory of other nodes (snapshots) or in storage (checkpoints). What `costs` has measured
    takes the place of what is assumed. Raises `ConfigError` for hours that cannot be.
    """
    if not LEAST_MTBF <= mtbf_hours <= MOST_MTBF:
        raise ConfigError(
            f"mtbf = {mtbf_hours:g}: a device fails once in {LEAST_MTBF:g} to {MOST_MTBF:g} hours, "
            "as 40000"
        )
    known = MeasuredCosts() if costs is None else costs.of_estimate(estimate)
    failure_seconds = mtbf_hours * 3600 / estimate.num_devices
    nodes = -(-estimate.num_devices // estimate.devices_per_node)
    write = estimate.state_bytes / (nodes * STORAGE_BANDWIDTH)
    copy = estimate.state_bytes / estimate.num_devices / estimate.network_bandwidth
    snapshots = keeping(
        estimate,
        _first(known.snapshot, copy),
        _first(known.rejoin, REJOIN_SECONDS + copy),
        failure_seconds,
    )
    checkpoints = keeping(
        estimate,
        _first(known.checkpoint, write),
        _first(known.restart, RESTART_SECONDS + write),
        failure_seconds,
    )
    return {
        "measured": known.names,
        "mtbf_hours": mtbf_hours,
        "failures_per_day": DAY / failure_seconds,
        "useful_fraction": max(snapshots.useful_fraction, checkpoints.useful_fraction),
        "snapshots": snapshots.as_dict(),
        "checkpoints": checkpoints.as_dict(),
    }


def _first(measured: float | None, assumed: float) -> float:
    """The measured seconds, else those assumed. No wait at all counts as a microsecond."""
    return assumed if measured is None else max(measured, SHORTEST_SECONDS)


def check_tokens(tokens: float) -> None:
    """Raises `ConfigError` for tokens that no run has."""
    if not 0 < tokens <= MOST_TOKENS:
        raise ConfigError(
            f"tokens = {tokens:g}: a run has more than none and {MOST_TOKENS:g} at most, as 15e12"
        )


def campaign(
    estimate: Estimate,
    tokens: float | None = None,
    mtbf_hours: float | None = None,
    costs: MeasuredCosts | KeepingRates | None = None,
) -> JsonObject:
    """The run over so many tokens: `days`, `device_hours`, `price`, `energy_kwh` (None where the
    board's power is unknown), and `goodput` where failures are asked about. Days and what follows
    from them then count failures, and are infinite where no useful time is left. Raises
    `ConfigError` for numbers that cannot be.
    """
    answer: JsonObject = {}
    useful = 1.0
    if mtbf_hours is not None:
        answer["goodput"] = goodput(estimate, mtbf_hours, costs)
        useful = answer["goodput"]["useful_fraction"]
    if tokens is None:
        return answer
    check_tokens(tokens)
    steps = math.ceil(tokens / estimate.tokens)
    seconds = steps * estimate.step_seconds / useful if useful > LEAST_USEFUL else math.inf
    low, high = estimate.bars()["step_seconds"]
    hours = seconds / 3600 * estimate.num_devices
    power = estimate.power_watts
    return {
        "tokens": tokens,
        "steps": steps,
        "days": seconds / DAY,
        "days_bar": [seconds / DAY * end / estimate.step_seconds for end in (low, high)],
        "device_hours": hours,
        "price": hours * estimate.price_per_hour,
        "energy_kwh": hours * power / 1000 if power else None,
        **answer,
    }
