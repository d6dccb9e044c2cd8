"""Rules on `[train]` for a client, whose optimizer starts again in every round."""

from __future__ import annotations

from plait.config import Config
from plait.errors import ConfigError


def check_local_training(config: Config) -> None:
    """Raise `ConfigError` for a training that clients would do otherwise than it is written."""
    train = config.train
    if train.schedule != "constant" or train.warmup_steps:
        raise ConfigError(
            f"train.schedule '{train.schedule}' with train.warmup_steps {train.warmup_steps} "
            "counts the steps of one training, and a client starts again in every round; use "
            "schedule 'constant' and warmup_steps 0"
        )
    if config.federated.strategy == "scaffold" and (train.optimizer != "sgd" or train.momentum):
        raise ConfigError(
            f"federated.strategy 'scaffold' takes mean gradients from changes over train.lr, and "
            f"train.optimizer '{train.optimizer}' with momentum {train.momentum:g} moves weights "
            "otherwise; use optimizer 'sgd' with momentum 0"
        )
