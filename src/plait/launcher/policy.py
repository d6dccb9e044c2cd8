"""The treatment of a run whose ranks are lost, and its end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from plait.errors import RunError
from plait.launcher.seat import LaunchPlan


def _unknown(pid: int) -> str | None:
    """No reason: where only the launcher ends processes."""
    return None


@dataclass(frozen=True)
class Policy:
    """The treatment of a run whose ranks are lost, or which a signal is to end.

    Attributes:
        restarts: lost ranks that are started again, in all.
        choose: the plan for so many ranks, None where there is none; None ends the run.
        wait_seconds: for a rank that is started again, before the others go on without it.
        deadline_seconds: to end after a signal.
        hang_seconds: after which a process that is stopped is lost; None for the least.
        why_ended: why a process of this number was ended, where another process has done so.
    """

    restarts: int = 0
    choose: Callable[[int], LaunchPlan | None] | None = None
    wait_seconds: float = 10.0
    deadline_seconds: float = 60.0
    hang_seconds: float | None = None
    why_ended: Callable[[int], str | None] = _unknown

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on without a rank that is lost."""
        return self.restarts > 0 or self.choose is not None


class PlanChoices:
    """The plans of a run: its own where it has the ranks for it, else what the policy chooses."""

    def __init__(self, own: LaunchPlan, choose: Callable[[int], LaunchPlan | None] | None) -> None:
        self._own = own
        self._choose = choose
        self._chosen: dict[int, LaunchPlan | None] = {}

    def of(self, num_ranks: int) -> LaunchPlan | None:
        """The plan for so many ranks, chosen once; None where there is none."""
        if num_ranks >= self._own.size:
            return self._own
        if self._choose is None:
            return None
        if num_ranks not in self._chosen:
            self._chosen[num_ranks] = self._choose(num_ranks)
        return self._chosen[num_ranks]


def deadline_passed(number: int, deadline_seconds: float) -> RunError:
    """The error of a run that a signal was to end, and that has not saved in time."""
    return RunError(
        f"{signal.Signals(number).name} came, and no checkpoint was whole after "
        f"{deadline_seconds:g} s ([recovery] deadline_seconds); what was saved before is kept: go "
        "on with --resume auto"
    )
