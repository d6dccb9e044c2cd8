"""The file by which an interrupted federation goes on: the server's state, and that of clients
which a simulation has.

It is written after each round, as a whole. The rounds that follow are those of a federation without
an interruption, to all digits. Noise alone, and who is drawn with it, comes from new secret seeds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
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
CHECKSUM = "crc32"
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
    *,
    federation: str = "",
) -> None:
    """Write the state after the last of `rounds`. `federation` is the name that a deployment has
    for this federation alone.
    """
    vectors = {"weights": server.weights}
    for name, vector in server.strategy.state().items():
        vectors[OF_STRATEGY + name] = vector
    for one in samples:
        if one.kept.control is not None:
            vectors[f"{OF_CLIENT}{one.client}"] = one.kept.control
    scales = {str(one.client): one.kept.scale for one in samples if one.kept.scale}
    head = json.dumps(
        {
            "rounds": [*rounds],
            "scales": scales,
            "config": described(config),
            "federation": federation,
        }
    )
    new = path.with_name(f"{path.name}.new")
    save_file(vectors, new, {HEAD: head, CHECKSUM: str(_checksum(head, vectors))})
    new.replace(path)


def read_state(
    path: Path, config: Config, server: Server, samples: Sequence[Samples], again: str
) -> tuple[list[JsonObject], str]:
    """Let server and clients go on as the file says.

    Returns the rounds that are done, and the name of the federation. `again` says, in an error, how
    to begin again.

    Raises:
        CheckpointError: no such file, another file, or that of another config.
    """
    head, vectors = _contents(path, again)
    rounds: list[JsonObject] = head["rounds"]
    before: JsonObject = head["config"]
    now = described(config)
    others = sorted(key for key in now | before if now.get(key) != before.get(key))
    if others:
        raise CheckpointError(
            f"{path}: the federation had another {', '.join(others)}; resume with the config that "
            f"it began with, or {again} to begin again"
        )
    if len(rounds) > config.federated.rounds:
        raise CheckpointError(
            f"{path}: the federation has done {len(rounds)} rounds, and federated.rounds is "
            f"{config.federated.rounds}; ask for {len(rounds)} or more"
        )
    weights = vectors["weights"]
    if weights.shape != server.weights.shape:
        raise CheckpointError(
            f"{path} has {weights.numel()} weights, and the model has {server.weights.numel()}; "
            f"resume with the model that it began with, or {again} to begin again"
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
        one.kept = ClientState(control, head["scales"].get(str(one.client)))
    return rounds, head["federation"]


def described(config: Config) -> JsonObject:
    """The keys that rounds depend on, by section and name.

    Processes change nothing, and neither does how long a server waits for whom. More rounds change
    none of those before, unless the learning rate goes over all of them.
    """
    free = {"federated.workers", "federated.min_replies", "federated.patience_seconds"}
    if optimizers.learning_rate(config.train) is None:
        free.add("federated.rounds")
    sections = config.as_dict()
    keys = {f"{name}.{key}": value for name in SECTIONS for key, value in sections[name].items()}
    plain: JsonObject = json.loads(json.dumps(keys))  # tuples are lists in the file
    return {key: value for key, value in plain.items() if key not in free}


def _contents(path: Path, again: str) -> tuple[JsonObject, dict[str, Tensor]]:
    """The head and the vectors of a whole file."""
    if not path.is_file():
        raise CheckpointError(
            f"there is no {path} to resume from; a simulation with --weights writes it after each "
            "round, so begin without --resume"
        )
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata()
            vectors = {name: file.get_tensor(name) for name in ("weights", *file.keys())}
        if _checksum(told[HEAD], vectors) != int(told[CHECKSUM]):
            raise ValueError("its checksum is another")
        head: JsonObject = json.loads(told[HEAD])
        return {key: head[key] for key in ("rounds", "scales", "config", "federation")}, vectors
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no state of a federation ({type(error).__name__}: {error}); "
            f"{again} to begin again"
        ) from error


def _checksum(head: str, vectors: Mapping[str, Tensor]) -> int:
    """The CRC-32 of the head and of each vector, by name."""
    value = zlib.crc32(head.encode())
    for _, vector in sorted(vectors.items()):
        value = zlib.crc32(vector.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value
