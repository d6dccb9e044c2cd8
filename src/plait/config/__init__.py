"""The config of a run, as TOML: strict schemas, overrides, and every fault said at once. Imports no
torch.
"""

from plait.config.config import Config, load
from plait.config.model import MODELS, ModelSection
from plait.config.sections import ClusterSection, Data, Federated, PlanSection, Train

__all__ = [
    "MODELS",
    "ClusterSection",
    "Config",
    "Data",
    "Federated",
    "ModelSection",
    "PlanSection",
    "Train",
    "load",
]
