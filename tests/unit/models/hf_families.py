"""Every class of the census from its tiny config, and what it starts from.

`python -m tests.unit.models.hf_families [FAMILY ...]` builds all that can be built from a tiny
config, with fresh memory that is NaN, and lists those that start from memory that nobody wrote.
"""

from __future__ import annotations

import sys

import torch
from benchmarks.census.configs import classes, makeable
from torch import Tensor, nn

from plait.engine.state.init import Initializer, place_holders
from plait.errors import ModelError
from plait.models import hf

SAMPLE = ["openai-gpt", "apertus", "gpt2", "llama", "qwen3_moe", "gpt_neox", "bloom", "mamba"]


def start(family: str, task: str = "causal") -> dict[str, Tensor]:
    """Parameters and buffers of the family as an engine begins with them, by name."""
    model = hf.make(makeable(task, family), task=task)
    cpu = torch.device("cpu")
    place_holders(model, torch.float32, cpu)

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value

    Initializer(model, 0, torch.float32, cpu).run(take)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def unwritten(family: str, task: str = "causal") -> list[str]:
    """Names of what holds NaN, where fresh memory does."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return [name for name, value in start(family, task).items() if value.isnan().any()]
    finally:
        torch.use_deterministic_algorithms(deterministic)


def main(names: list[str]) -> int:
    """Print a line a family; 1 where one starts from unwritten memory."""
    counts = {"written": 0, "refused": 0, "unwritten": 0}
    for task, family in classes():
        if family not in (names or [family]):
            continue
        said = ""
        try:
            found = unwritten(family, task)
            kind = "unwritten" if found else "written"
            said = ", ".join(found[:4])
        except ModelError as refused:
            kind = "refused"
            said = str(refused)[:160]
        except Exception as failure:  # the library's, of a config that it cannot fill in
            kind = "refused"
            said = f"{type(failure).__name__}: {str(failure)[:140]}"
        counts[kind] += 1
        print(f"{family:28} {kind:10} {said}".rstrip(), flush=True)
    print(counts)
    return 1 if counts["unwritten"] else 0


if __name__ == "__main__":
    hf.library().logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
