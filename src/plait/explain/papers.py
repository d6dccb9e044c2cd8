"""Paper and formula of every strategy that a term can name; they stand in `papers.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from plait.errors import ConfigError
from plait.toml import read_toml


@dataclass(frozen=True)
class PaperSource:
    """The idea of a strategy in words, its formula, and the paper that it is from."""

    title: str
    idea: str
    formula: str
    paper: str


@lru_cache(maxsize=1)
def sources() -> Mapping[str, PaperSource]:
    """The rows of `papers.toml`, by the name of the strategy."""
    tables = read_toml(Path(__file__).with_name("papers.toml"), ConfigError)
    return MappingProxyType({name: PaperSource(**table) for name, table in tables.items()})


OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "multiply": "C = A B",
        "attention": "O = softmax(Q K^T / sqrt(K)) V",
        "all_reduce": "out_r = sum over s of in_s",
        "reduce_scatter": "out_r = sum over s of in_s[part r]",
        "all_gather": "out_r = [in_0, in_1, ...]",
        "all_to_all": "out_r[part s] = in_s[part r]",
        "broadcast": "out_r = in_root",
        "reduce": "out_root = sum over s of in_s",
        "send": "out_peer = in_r",
        "receive": "out_r = in_peer",
        "shift": "out_(r+k) = in_r",
        "push": "gradients to the servers",
        "pull": "weights from the servers",
        "control": "sums of the loss, the number of samples and the squared norm",
    }
)
