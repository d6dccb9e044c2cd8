"""A round whose single changes the server never sees: the four steps of `secure`, as questions to
clients and their answers.

`SecureClients` is the clients' side, `secret_sum` the server's. Contents of messages travel between
them (see `wire`). A client weighs its change by its examples *before* masking
and appends their number. So the server learns the two sums only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.errors import RunError
from plait.outer.federated import privacy, secure
from plait.outer.federated.messages import Reply, TrainTask, tell_missing
from plait.outer.federated.secure import Ciphertext, PublicKeys, SecureClient
from plait.values import JsonObject

Content = tuple[JsonObject, dict[str, Tensor]]
Ask = Callable[[str, Mapping[int, Content]], dict[int, Content]]
Train = Callable[[TrainTask, Sequence[int]], list[Reply]]
PHASES = ("advertise", "share", "mask", "unmask")


class SecureClients:
    """The secrets of the clients that live here, each of one round."""

    def __init__(self, clip: float | None) -> None:
        self._clip = clip
        self._clients: dict[int, tuple[int, SecureClient]] = {}

    def advertise(self, client: int, content: Content) -> Content:
        """Step 1: new keys for round `number`."""
        self._clients[client] = int(content[0]["number"]), SecureClient(client)
        keys = self._of(client, content).advertise()
        return {"client": client, "keys": [hex(keys.mask), hex(keys.channel)]}, {}

    def share(self, client: int, content: Content) -> Content:
        """Step 2: shares of this client's secrets, sealed for each other client."""
        keys = {int(other): _keys(pair) for other, pair in content[0]["keys"].items()}
        sealed = self._of(client, content).share(keys, int(content[0]["threshold"]))
        return {
            "client": client,
            "sealed": {str(o): [s.body.hex(), s.tag.hex()] for o, s in sealed.items()},
        }, {}

    def mask(self, client: int, content: Content, reply: Reply) -> Content:
        """Step 3: this round's change under masks. Raises `RunError` for one that has no sum."""
        if self._clip is not None:
            reply = replace(reply, change=privacy.clip(reply.change, self._clip), num_examples=1)
        received = {
            int(other): Ciphertext(*map(bytes.fromhex, pair))
            for other, pair in content[0]["received"].items()
        }
        weighed = torch.cat(
            [reply.change.double() * reply.num_examples, torch.tensor([float(reply.num_examples)])]
        )
        secure.check_summable(weighed, len(received))
        masked = self._of(client, content).mask(secure.to_fixed(weighed), received)
        return {"client": client, "metrics": dict(reply.metrics)}, {"masked": masked}

    def unmask(self, client: int, content: Content) -> Content:
        """Step 4: what takes off the masks of the sum."""
        seeds, keys = self._of(client, content).unmask(frozenset(map(int, content[0]["survivors"])))
        return {"client": client, "seeds": _hexes(seeds), "keys": _hexes(keys)}, {}

    def _of(self, client: int, content: Content) -> SecureClient:
        number, secrets = self._clients.get(client, (None, None))
        if secrets is None or number != int(content[0]["number"]):
            raise RunError(
                f"client {client} has no secrets of round {content[0]['number']}: it began after "
                "the round did"
            )
        return secrets


@dataclass(frozen=True)
class SecretSum:
    """The result for the server: one change (numel,), the clients in it, and the bytes of all
    messages.
    """

    change: Tensor
    num_examples: float
    answered: tuple[int, ...]
    losses: tuple[float, ...]
    num_bytes: int


def secret_sum(ask: Ask, task: TrainTask, clients: Sequence[int]) -> SecretSum:
    """Run the four steps with those of `clients` that are there. Raises `RunError` when too few are
    left for the sum.
    """
    threshold = len(clients) // 2 + 1
    head = {"number": task.number}
    vectors = {"weights": task.weights, **task.extra}
    advertised = ask("advertise", {client: (head, {}) for client in clients})
    keys = {client: content[0]["keys"] for client, content in advertised.items()}
    listed = {str(client): pair for client, pair in keys.items()}
    _enough(keys, threshold)
    shared = ask("share", {c: ({**head, "keys": listed, "threshold": threshold}, {}) for c in keys})
    _enough(shared, threshold)
    boxes = {c: {str(s): shared[s][0]["sealed"][str(c)] for s in shared} for c in shared}
    masked_answers = ask("mask", {c: ({**head, "received": boxes[c]}, vectors) for c in shared})
    numel = task.weights.numel() + 1
    masked = {
        c: content[1]["masked"]
        for c, content in sorted(masked_answers.items())
        if _is_masked(content, numel)
    }
    _enough(masked, threshold)
    answers = ask("unmask", {c: ({**head, "survivors": sorted(masked)}, {}) for c in masked})
    given = [(_ints(answers[c][0]["seeds"]), _ints(answers[c][0]["keys"])) for c in sorted(answers)]
    public = {client: _keys(pair) for client, pair in keys.items()}
    total = secure.from_fixed(secure.unmask_sum(masked, public, given, sorted(answers), threshold))
    losses = tuple(
        masked_answers[c][0]["metrics"]["train_loss"]
        for c in masked
        if "train_loss" in masked_answers[c][0]["metrics"]
    )
    num_bytes = sum(
        _size(content) for phase in (shared, masked_answers, answers) for content in phase.values()
    ) + 2 * 256 * len(keys)
    return SecretSum(total[:-1], float(total[-1]), tuple(masked), losses, num_bytes)


def answer(
    secure_clients: SecureClients, phase: str, contents: Mapping[int, Content], train: Train
) -> dict[int, Content]:
    """The clients' answers to one step; those whose training fails drop out of the third."""
    if phase != "mask":
        return {
            client: getattr(secure_clients, phase)(client, content)
            for client, content in contents.items()
        }
    answers = {}
    head, vectors = next(iter(contents.values()))  # the task is alike for all clients of a round
    extra = {name: vector for name, vector in vectors.items() if name != "weights"}
    for reply in train(TrainTask(int(head["number"]), vectors["weights"], extra), [*contents]):
        client = reply.client
        try:
            answers[client] = secure_clients.mask(client, contents[client], reply)
        except RunError as error:
            tell_missing(client, error)
    return answers


def _is_masked(content: Content, numel: int) -> bool:
    vector = content[1].get("masked")
    return vector is not None and vector.dtype == torch.int64 and vector.shape == (numel,)


def _enough(left: Mapping[int, object], threshold: int) -> None:
    if len(left) < threshold:
        raise RunError(
            f"{len(left)} clients are left of the {threshold} that secure aggregation needs; the "
            "round is void"
        )


def _size(content: Content) -> int:
    """Bytes of the vectors and of the hexadecimal numbers, counted as numbers."""
    words = [
        word for value in content[0].values() if isinstance(value, dict) for word in value.values()
    ]
    digits = sum(
        len(w)
        for word in words
        for w in (word if isinstance(word, list) else [word])
        if isinstance(w, str)
    )
    return (
        sum(vector.numel() * vector.element_size() for vector in content[1].values()) + digits // 2
    )


def _keys(pair: Sequence[str]) -> PublicKeys:
    return PublicKeys(int(pair[0], 16), int(pair[1], 16))


def _hexes(values: Mapping[int, int]) -> dict[str, str]:
    return {str(key): hex(value) for key, value in values.items()}


def _ints(values: Mapping[str, str]) -> dict[int, int]:
    return {int(key): int(value, 16) for key, value in values.items()}
