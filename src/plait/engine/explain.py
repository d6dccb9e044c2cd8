"""torch's errors in the words of a user: which token, which target, how much memory.

Nothing is checked before a step, which would cost every step. When torch has refused, the batch is
inspected and the finding is said. An error that it cannot explain stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.errors import DataError, OutOfMemory, PlaitError

_CPU_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_CURE = (
    "try more micro-batches (mb), remat:full, precision:bf16 or dp:zero3, or a smaller batch; "
    "plait estimate says what a plan needs"
)


@contextmanager
def explained(
    rank: int, what: str, find: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Raise torch's errors as plait's: `OutOfMemory`, and `DataError` with what `find` finds."""
    try:
        yield
    except PlaitError:
        raise
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        raise OutOfMemory(f"rank {rank} is out of memory in {what}: {first}; {_CURE}") from error
    except MemoryError as error:
        raise OutOfMemory(f"rank {rank} is out of memory in {what}; {_CURE}") from error
    except (IndexError, RuntimeError, ValueError) as error:
        if match := _CPU_MEMORY.search(str(error)):
            size = f"{int(match[1]) / 1e9:,.1f} GB more than there is"
            raise OutOfMemory(f"rank {rank} asked in {what} for {size}; {_CURE}") from error
        if (found := find()) is not None:
            raise DataError(found) from error
        raise


def fault_of(model: nn.Module, batches: Iterable[tuple[Any, Any]], what: str) -> str | None:
    """The fault in the tokens of (inputs, targets) for a model that looks tokens up. None where
    there is none.
    """
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding))
    table = next(tables, None)  # tokens come before positions
    if table is None:
        return None
    vocab_size = table.num_embeddings
    for inputs, targets in batches:
        tokens = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if tokens and all(leaf.is_floating_point() for leaf in tokens):
            return (
                f"{what}: the inputs are {tokens[0].dtype}, and the model looks tokens up; "
                "give token numbers as integers (torch.long)"
            )
        for name, leaves in (("token", tokens), ("target", tree_leaves(targets))):
            if (wrong := _outside(leaves, vocab_size, name)) is not None:
                return (
                    f"{what}: {name} {wrong} is outside the vocabulary of {vocab_size} "
                    f"(0 to {vocab_size - 1}); fit the tokenizer or [model] vocab_size"
                )
    return None


def _outside(leaves: Iterable[Any], vocab_size: int, name: str) -> int | None:
    """The first whole number outside a vocabulary; of targets, a negative one masks."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or not leaf.numel():
            continue
        high = int(leaf.max())
        low = int(leaf.min())
        if high >= vocab_size:
            return high
        if low < 0 and name == "token":
            return low
    return None
