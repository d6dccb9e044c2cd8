"""The page of a run that goes on, served by the process that started its ranks.

The page reads the run's folder, as `plait status` does: the ranks know nothing of it. The server
lives in a thread beside the launcher, and ends with the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.answer import Answer, Json, to_json
from plait.errors import ConfigError, NotAvailable, PlaitError
from plait.launcher import joined_world

if TYPE_CHECKING:
    from plait.explore.question import Choices
    from plait.explore.server import PageServer, WebReply
    from plait.run.rundata import Prediction

MOST_STEPS = 2000
"""Steps that a page is sent; of a longer run every n-th."""


def check() -> None:
    """Raises `NotAvailable` where this process starts no ranks, so that no process would serve."""
    if joined_world() is not None:
        raise NotAvailable(
            "--live serves the page from the process that starts the ranks, and here torchrun has "
            "started them; leave --live out, and look with plait status RUN_DIR"
        )


def served(folder: Path, train: Callable[[], Answer]) -> Answer:
    """The address of the page, and then the answer of `train`, during which it is served."""
    from plait.explore.html import LIVE, page
    from plait.explore.server import PageServer, Site

    html, policy = page({}, LIVE)
    answers = {"/plan.json": LiveData(folder).reply}
    site = Site(html, answers, policy=policy, keeps=False, hint="")
    server = PageServer(site)

    def serve() -> Answer:
        with serving(server):
            return train()

    return Answer({"url": server.url}, server.url, serve=serve)


@contextmanager
def serving(server: PageServer) -> Iterator[None]:
    """Serve inside, in a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=1.0)


class LiveData:
    """The data of the page: the status of a run, its steps so far, and the prediction."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._predicted: dict[str, tuple[Prediction | None, str]] = {}

    def reply(self, choices: Choices) -> WebReply:
        """The data as they are now."""
        from plait.explore.server import WebReply

        try:
            return WebReply(to_json(self.data()))
        except PlaitError as error:
            message = {"error": str(error), "kind": type(error).__name__}
            return WebReply(to_json(message), HTTPStatus.BAD_REQUEST)

    def data(self) -> Json:
        """`status`, and beside it `metrics`, `predicted` (an estimate, or None) and its cluster."""
        from plait.run.health import metrics_so_far, status_of
        from plait.run.rundir import RunFolder

        folder = RunFolder(self.folder)
        try:
            status = status_of(self.folder)
        except ConfigError:  # no rank has begun yet
            status = dict(NOTHING_YET, run=str(self.folder))
        metrics = metrics_so_far(folder)
        every = -(-len(metrics) // MOST_STEPS) or 1
        guess, why = self._prediction(str(status["plan"] or ""))
        return {
            **status,
            "metrics": metrics[::-1][::every][::-1],
            "predicted": None if guess is None else guess.numbers,
            "predicted_for": None if guess is None else guess.cluster,
            "why_no_prediction": why,
        }

    def _prediction(self, plan: str) -> tuple[Prediction | None, str]:
        """The prediction for a plan, made once; a run that goes on under another has another."""
        from plait.plan import Plan
        from plait.run.rundata import predict
        from plait.run.rundir import RunFolder

        if not plan:
            return None, "the run has not begun"
        if plan not in self._predicted:
            self._predicted[plan] = predict(RunFolder(self.folder).config, Plan.parse(plan))
        return self._predicted[plan]


NOTHING_YET: Json = {
    "state": "starting",
    "plan": None,
    "step": 0,
    "steps": None,
    "loss": None,
    "step_seconds": None,
    "tokens_per_second": None,
    "ranks": [],
    "last_checkpoint": None,
    "findings": 0,
}
