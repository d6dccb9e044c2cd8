"""The text form of a schedule: what `str` is to an action. It round-trips, diffs well, and is how a
user brings their own.

    name mine
    micro-batches 2
    placement 0 1
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1

`delay`, `steps` and `asynchronous` are written where they are not the default; `#` starts a
comment.
"""

from __future__ import annotations

from pathlib import Path

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Action, Schedule
from plait.parallel.pipeline.verify import verify


def dumps(schedule: Schedule) -> str:
    """The text of a schedule; `loads` gives the schedule back."""
    head = [f"name {schedule.name}", f"micro-batches {schedule.num_micro_batches}"]
    head.append("placement " + " ".join(map(str, schedule.placement)))
    head += [f"steps {schedule.num_steps}"] if schedule.num_steps != 1 else []
    head += [f"delay {schedule.delay}"] if schedule.delay is not None else []
    head += ["asynchronous"] if schedule.asynchronous else []
    return "\n".join(
        [
            *head,
            *(
                f"{rank}: {' '.join(map(str, actions))}"
                for rank, actions in enumerate(schedule.ranks)
            ),
            "",
        ]
    )


def loads(text: str, source: str = "schedule") -> Schedule:
    """Read a schedule and verify it. Raises ScheduleError that names `source`, the line and what is
    wrong with it.
    """
    fields: dict[str, str] = {}
    ranks: dict[int, tuple[Action, ...]] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        head, colon, actions = line.partition(":")
        try:
            if colon:
                ranks[int(head)] = tuple(Action.parse(word) for word in actions.split())
            else:
                word, _, rest = line.partition(" ")
                fields[_known(word)] = rest
        except (ScheduleError, ValueError) as error:
            raise ScheduleError(f"{source}, line {number}: {error}") from error
    try:
        schedule = _assembled(fields, ranks)
    except (ScheduleError, ValueError) as error:
        raise ScheduleError(f"{source}: {error}") from error
    verify(schedule)
    return schedule


def load(path: str | Path) -> Schedule:
    """Read a schedule from a text file and verify it.

    Raises:
        ScheduleError: the file cannot be read, or the schedule is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"{path}: {error.strerror if isinstance(error, OSError) else 'this is no text file'}"
        ) from error
    return loads(text, str(path))


def _known(word: str) -> str:
    if word not in ("name", "micro-batches", "placement", "steps", "delay", "asynchronous"):
        raise ScheduleError(
            f"'{word}' is no field; known: asynchronous, delay, micro-batches, name, placement, "
            "steps, and RANK:"
        )
    return word


def _assembled(fields: dict[str, str], ranks: dict[int, tuple[Action, ...]]) -> Schedule:
    for needed in ("micro-batches", "placement"):
        if needed not in fields:
            raise ScheduleError(f"the line '{needed} ...' is missing")
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise ScheduleError(f"ranks must be 0 to n-1 without gaps, found {sorted(ranks)}")
    placement = tuple(int(word) for word in fields["placement"].split())
    num_micro_batches = int(fields["micro-batches"])
    delay = int(fields["delay"]) if "delay" in fields else None
    num_steps = int(fields.get("steps", "1"))
    for name, number, least in (
        ("micro-batches", num_micro_batches, 1),
        ("delay", delay, 0),
        ("steps", num_steps, 1),
    ):
        if number is not None and number < least:
            raise ScheduleError(f"{name} {number}: the least is {name} {least}")
    if num_micro_batches % num_steps:
        raise ScheduleError(
            f"micro-batches {num_micro_batches} are those of all steps, and steps {num_steps} do "
            "not divide them"
        )
    num_actions = sum(map(len, ranks.values()))
    if len(placement) * num_micro_batches > num_actions:
        raise ScheduleError(
            f"{len(placement)} stages and micro-batches {num_micro_batches} need two actions for "
            f"each pair, and {num_actions} actions are listed in all"
        )
    if set(placement) != set(ranks):
        raise ScheduleError(
            f"placement names the ranks {sorted(set(placement))}, the lists are of ranks "
            f"{sorted(ranks)}"
        )
    return Schedule(
        fields.get("name", "unnamed"),
        placement,
        num_micro_batches,
        tuple(ranks[rank] for rank in sorted(ranks)),
        delay=delay,
        num_steps=num_steps,
        asynchronous="asynchronous" in fields,
    )
