"""The seconds in which this machine's ranks recover from the loss of one, by a small run."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from typing import Final

from plait.config import Config
from plait.errors import PlaitError
from plait.launcher.board import NOTHING
from plait.launcher.keeper import keep
from plait.launcher.policy import Policy
from plait.launcher.seat import LaunchPlan, Seat
from plait.run import kept
from plait.run.job import TrainingRun
from plait.values import JsonObject

STEPS: Final = 24
KILLED_AFTER: Final = 3
"""Steps after which a rank is killed: the first ones are slow for other reasons."""
LOOK_SECONDS: Final = 0.001


def recovery_seconds(num_ranks: int) -> float | None:
    """The seconds from the loss of a rank to the next step that all have done.

    The model is so small that its state, its values and its step take next to nothing. None where
    the run had ended before the kill, or cannot be made here.
    """
    job = TrainingRun(_config(num_ranks), f"dp{num_ranks}", shows_progress=False)
    layout = LaunchPlan(job.plan, num_ranks)
    told = io.StringIO()  # the user has not asked for this run, so its losses are not said
    try:
        with contextlib.redirect_stderr(told):
            result: JsonObject = keep(_killed_once, (job,), layout, Policy(restarts=1)).results[0]
    except PlaitError:
        return None
    seconds = [one["seconds"] for one in result["recoveries"]]
    return next((float(one) for one in seconds if one is not None), None)


def _config(num_ranks: int) -> Config:
    """The run: a model of two small layers, and a snapshot of each step."""
    model = {
        "name": "gpt",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    train = {"steps": STEPS, "global_batch": num_ranks, "linear_product": "rule"}
    recovery = {"restarts": 1, "snapshot_every": 1}
    data = {"name": "random", "seq_len": 16}
    return Config.load({"model": model, "data": data, "train": train, "recovery": recovery})


def _killed_once(seat: Seat, job: TrainingRun) -> None:
    """Train; the last rank is killed once."""
    if seat.number == seat.board.num_seats - 1 and seat.board.void == NOTHING:
        threading.Thread(target=_kill, args=(seat,), daemon=True).start()
    kept.run(seat, job)


def _kill(seat: Seat) -> None:
    """End this process once some steps are done."""
    while seat.board.done(seat.number) < KILLED_AFTER:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
