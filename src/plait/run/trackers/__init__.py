"""Trackers: the metrics of a run in TensorBoard, Weights & Biases or MLflow."""

from plait.run.trackers.hook import TRACKERS, Trackers, check_packages

__all__ = ["TRACKERS", "Trackers", "check_packages"]
