"""The file by which an interrupted simulation goes on: the server's state and the clients'.

It is written after each round, as a whole. The rounds that follow are those of a simulation without
an interruption, to all digits. Noise alone, and who is drawn with it, comes from new secret seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from plait.config import Config
from plait.errors import CheckpointError
from plait.outer.federated.rounds import Server
from plait.outer.federated.samples import ClientState, Samples
from plait.run import optimizers
from plait.values import JsonObject

SECTIONS = ("model", "data", "train", "plan", "federated")
HEAD = "plait"
OF_STRATEGY = "strategy."
OF_CLIENT = "control."


def state_path(weights: Path) -> Path:
    """The state's file beside that of the weights."""
    return weights.with_name(f"{weights.name}.state")


def write_state(
    path: Path,
    config: Config,
    server: Server,
    samples: Sequence[Samples],
    rounds: Sequence[JsonObject],
) -> None:
    """Write the state after the last of `rounds`."""
    vectors = {"weights": server.weights}
    for name, vector in server.strategy.state().items():
        vectors[OF_STRATEGY + name] = vector
    for one in samples:
        if one.kept.control is not None:
            vectors[f"{OF_CLIENT}{one.client}"] = one.kept.control
    scales = {str(one.client): one.kept.scale for one in samples if one.kept.scale}
    head = {"rounds": [*rounds], "scales": scales, "config": described(config)}
    new = path.with_name(f"{path.name}.new")
    save_file(vectors, new, {HEAD: json.dumps(head)})
    new.replace(path)


def read_state(
    path: Path, config: Config, server: Server, samples: Sequence[Samples]
) -> list[JsonObject]:
    """Let server and clients go on as the file says, and return the rounds that are done.

    Raises:
        CheckpointError: no such file, another file, or that of another config.
    """
    rounds, scales, before, vectors = _contents(path)
    now = described(config)
    others = sorted(key for key in now | before if now.get(key) != before.get(key))
    if others:
        raise CheckpointError(
            f"{path}: the simulation had another {', '.join(others)}; resume with the config that "
            "it began with, or leave --resume out to begin again"
        )
    if len(rounds) > config.federated.rounds:
        raise CheckpointError(
            f"{path}: the simulation has done {len(rounds)} rounds, and federated.rounds is "
            f"{config.federated.rounds}; ask for {len(rounds)} or more"
        )
    weights = vectors["weights"]
    if weights.shape != server.weights.shape:
        raise CheckpointError(
            f"{path} has {weights.numel()} weights, and the model has {server.weights.numel()}; "
            "resume with the model that it began with, or leave --resume out to begin again"
        )
    server.weights = weights
    server.strategy.load_state(
        {
            name.removeprefix(OF_STRATEGY): vector
            for name, vector in vectors.items()
            if name.startswith(OF_STRATEGY)
        }
    )
    for one in samples:
        control = vectors.get(f"{OF_CLIENT}{one.client}")
        one.kept = ClientState(control, scales.get(str(one.client)))
    return rounds


def described(config: Config) -> JsonObject:
    """The keys that rounds depend on, by section and name.

    Processes change nothing. More rounds change none of those before, unless the learning rate goes
    over all of them.
    """
    free = {"federated.workers"}
    if optimizers.learning_rate(config.train) is None:
        free.add("federated.rounds")
    sections = config.as_dict()
    keys = {f"{name}.{key}": value for name in SECTIONS for key, value in sections[name].items()}
    plain: JsonObject = json.loads(json.dumps(keys))  # tuples are lists in the file
    return {key: value for key, value in plain.items() if key not in free}


def _contents(
    path: Path,
) -> tuple[list[JsonObject], JsonObject, JsonObject, dict[str, Tensor]]:
    """The rounds, the loss scales by client, the config's keys and the vectors."""
    if not path.is_file():
        raise CheckpointError(
            f"there is no {path} to resume from; a simulation with --weights writes it after each "
            "round, so begin without --resume"
        )
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads(file.metadata()[HEAD])
            vectors = {name: file.get_tensor(name) for name in ("weights", *file.keys())}
        return head["rounds"], head["scales"], head["config"], vectors
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no state of a simulation ({type(error).__name__}: {error}); "
            "leave --resume out to begin again"
        ) from error
