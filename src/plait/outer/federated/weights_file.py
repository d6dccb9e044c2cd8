"""The file of a federation's newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_weights(path: Path, weights: Mapping[str, Tensor], number: int) -> None:
    """Write the weights [...] after a round, by the names of the model's parameters.

    The file is whole at any moment; safetensors reads it. Its meta data says the round.
    """
    from safetensors.torch import save_file

    new = path.with_name(f"{path.name}.new")
    save_file(dict(weights), new, {"round": str(number)})
    new.replace(path)
