"""MLflow: the server of `MLFLOW_TRACKING_URI`, else a database in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from plait.run.trackers.tracker import PROJECT, TrackedRun

LONGEST_PARAMETER = 500


class MLflow:
    """Metrics by step, the config as parameters, and the report as an artefact."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.folder.resolve()}/mlflow.db")
        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = (run.folder.resolve() / "mlflow").as_uri() if "sqlite" in uri else None
            number = self._client.create_experiment(name, artifact_location=place)
        else:
            number = experiment.experiment_id
        before = self._client.search_runs([number], f"tags.plait_id = '{run.id}'")
        tags = {"plait_id": run.id, "mlflow.runName": run.folder.name}
        goes_on = bool(before) and run.first_step > 1
        created = before[0] if goes_on else self._client.create_run(number, tags=tags)
        self._id = created.info.run_id
        self._goes_on = goes_on
        self._sent: dict[str, int] = {}
        if not goes_on:
            for key, value in run.settings().items():
                self._client.log_param(self._id, key, str(value)[:LONGEST_PARAMETER])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if step > self._last_sent(name):
                self._client.log_metric(self._id, name, value, step=step)
                self._sent[name] = step

    def go_back(self, step: int) -> None:
        """A series keeps what it was told first, since MLflow takes nothing back."""

    def _last_sent(self, name: str) -> int:
        """The last step of a series, also before this process; repeated steps are in it already."""
        if name not in self._sent:
            history = self._client.get_metric_history(self._id, name) if self._goes_on else []
            self._sent[name] = max((one.step for one in history), default=0)
        return self._sent[name]

    def finish(self, report: Path | None) -> None:
        if report is not None:
            self._client.log_artifact(self._id, str(report))
        self._client.set_terminated(self._id)
