"""Job scripts: one run of `plait train` for the queue or the cluster that a user has."""

from plait.jobs.api import TARGETS, script_for
from plait.jobs.job import JobScript, TrainJob

__all__ = ["TARGETS", "JobScript", "TrainJob", "script_for"]
