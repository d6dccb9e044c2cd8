"""Rules on `[train]` for a client, whose optimizer starts again in every round."""

from __future__ import annotations

from plait.config import Config
from plait.errors import ConfigError, RunError
from plait.plan import Plan
from plait.plan.facts import SCHEDULES
from plait.run import optimizers


class RoundRate:
    """The factor on the learning rate, one number for all steps of all clients in a round.

    The schedule of `[train]` goes over the rounds, and each round is one step of it. Warm-up takes
    as large a part of the rounds, rounded up, as `warmup_steps` is of `steps`.
    """

    def __init__(self, config: Config) -> None:
        train = config.train
        self._rounds = config.federated.rounds
        warmup = -(-train.warmup_steps * self._rounds // train.steps)
        over_rounds = {"steps": self._rounds, "warmup_steps": warmup}
        self._of_round = optimizers.learning_rate(train.model_copy(update=over_rounds))
        self.factor = 1.0

    def begin(self, number: int) -> None:
        """Take the factor of a round, from 1.

        Raises:
            RunError: a round after the schedule's last.
        """
        if self._of_round is None:
            return
        if number > self._rounds:
            raise RunError(
                f"round {number} comes after the {self._rounds} of federated.rounds, over which "
                "the learning rate has its schedule; give clients the server's federated.rounds"
            )
        self.factor = self._of_round(number - 1)

    def __call__(self, step: int) -> float:
        """The factor at any step of the round."""
        return self.factor


def check_local_training(config: Config) -> None:
    """Raise `ConfigError` for a training that FedProx and SCAFFOLD cannot correct.

    They add to the gradients of each step. From its changes SCAFFOLD tells mean gradients.
    """
    train = config.train
    strategy = config.federated.strategy
    if strategy not in ("fedprox", "scaffold"):
        return
    plan = Plan.parse(config.plan.text)
    if SCHEDULES[plan.pp.schedule].asynchronous or plan.dp.stale:
        raise ConfigError(
            f"federated.strategy '{strategy}' adds to the gradients of each step, and under "
            f"'{plan}' a client's gradients are of older weights; take a schedule and a strategy "
            "that step together, or fedavg"
        )
    if strategy != "scaffold":
        return
    found = None
    if train.optimizer != "sgd":
        found = f"optimizer '{train.optimizer}'"
    elif train.momentum:
        found = f"momentum {train.momentum:g}"
    elif train.clip_grad_norm is not None:
        found = f"clip_grad_norm {train.clip_grad_norm:g}"
    elif any(group.lr not in (None, train.lr) for group in train.groups):
        found = "groups that have an lr of their own"
    elif plan.dp.strategy == "local" and (train.outer_lr != 1.0 or train.outer_momentum):
        found = f"outer_lr {train.outer_lr:g} and outer_momentum {train.outer_momentum:g}"
    if found is not None:
        raise ConfigError(
            "federated.strategy 'scaffold' takes a client's mean gradient from its change over "
            f"train.lr, and train has {found}; use optimizer 'sgd' with momentum 0, without "
            "clip_grad_norm and with one lr; local's outer_lr is 1 and outer_momentum 0"
        )
