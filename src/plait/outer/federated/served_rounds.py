"""The rounds of a deployment's server, on its disk, and how an interrupted server goes on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from plait.checkpoint.folder import write_text_atomic
from plait.config import Config
from plait.outer.federated.rounds import Round, Server
from plait.outer.federated.server_state import read_state, state_path, write_state
from plait.outer.federated.simulation import totals
from plait.outer.federated.weights_file import write_weights
from plait.values import JsonObject

AGAIN = "call begin.sh with --restart"


class ServedRounds:
    """The rounds that a server has done, and the name of its federation."""

    def __init__(self, config: Config, server: Server, out: Path) -> None:
        """Keep the numbers of rounds in `out`, and the weights and the server's state beside it."""
        self.rounds: list[JsonObject] = []
        self.federation = secrets.token_hex(16)
        self._config = config
        self._server = server
        self._out = out
        self._weights = out.with_name("weights.safetensors")

    def go_on(self) -> None:
        """Take up the rounds of an interrupted server, if there are any.

        Raises:
            CheckpointError: the state is damaged, or that of another config.
        """
        state = state_path(self._weights)
        if not state.exists():
            return
        self.rounds, self.federation = read_state(state, self._config, self._server, (), AGAIN)
        of = self._config.federated.rounds
        print(f"plait: {state} has {len(self.rounds)} of {of} rounds; {AGAIN} to begin again")

    def begin_again(self) -> None:
        """Forget an earlier federation, so that an interruption does not lead back to it."""
        state_path(self._weights).unlink(missing_ok=True)

    def add(self, done: Round) -> None:
        """Note a round that was done, in the state that holds all the rest."""
        self.rounds.append(done.as_dict())
        write_state(
            state_path(self._weights),
            self._config,
            self._server,
            (),
            self.rounds,
            federation=self.federation,
        )

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights [...], by the names of parameters, and the numbers of all rounds."""
        write_weights(self._weights, weights, len(self.rounds))
        numbers = {"rounds": self.rounds, **totals(self.rounds)}
        write_text_atomic(self._out, json.dumps(numbers, indent=2) + "\n")
