"""Whether the documents of packed samples stay apart in a model of any kind: seen in a rehearsal.

The model runs without values, as for a cut of its sequences. Inside its blocks nothing but
`scaled_dot_product_attention` may mix positions. Every call of it has to have a mask that was
computed from the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from plait.errors import ModelError, PlaitError
from plait.parallel.context.lengths import SAMPLES, inputs_like, unlike_sizes
from plait.parallel.context.mixing import mixes
from plait.parallel.context.rehearsal import Run, named_calls
from plait.parallel.context.shared import Interception, zeros_of
from plait.torch_internals import no_dispatch_modes
from plait.values import PyTree

CURE = "packed documents would see each other; leave packing out"


class _Descent(TorchDispatchMode):
    """Knows which tensors were computed from some, and hands every operation to `note`."""

    def __init__(self, note: Callable[[OpOverload, PyTree, PyTree, PyTree], None]) -> None:
        super().__init__()
        self._note = note
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def begin_with(self, tensor: Tensor) -> None:
        """A tensor that others may be computed from."""
        self._known[tensor] = True

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._known

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        """Results of what is known are known."""
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x in self for x in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.begin_with(leaf)
        self._note(func, args, kwargs or {}, result)
        return result


def check_documents(model: nn.Module, blocks: Sequence[str], run: Run) -> None:
    """Raise `ModelError` for a model in which documents of packed samples see each other.

    `run` calls the model on inputs that its argument makes of an example, with parameters without
    values. The example is token numbers, documents and positions, each [batch, sequence].
    """
    length = unlike_sizes(model)[0]
    failures = []
    for device in ("meta", "cpu"):  # a forward that reads values runs on the host
        try:
            num_calls = _rehearse(model, blocks, run, length, device)
        except PlaitError:
            raise
        except Exception as failure:
            failures.append(f"{type(failure).__name__}: {failure}")
            continue
        if num_calls == 0:
            raise ModelError(
                f"a {type(model).__name__} calls no scaled_dot_product_attention in its blocks, "
                f"whose mask keeps documents apart: {CURE}"
            )
        return
    raise ModelError(
        f"a {type(model).__name__} does not run on packed documents without values, which shows "
        f"whether they see each other ({failures[-1]}); leave packing out"
    )


def _rehearse(model: nn.Module, blocks: Sequence[str], run: Run, length: int, device: str) -> int:
    """The calls of attention inside the blocks, each of which has a mask of documents."""
    stack = [""]
    calls: list[str] = []
    lengths = {length, SAMPLES * length}

    def kind_of(name: str) -> str:
        return f"'{name}' ({type(model.get_submodule(name)).__name__})"

    def is_inside() -> bool:
        return any(f"{stack[-1]}.".startswith(f"{block}.") for block in blocks)

    def note(func: OpOverload, args: PyTree, kwargs: PyTree, result: PyTree) -> None:
        if is_inside() and mixes(func, args, kwargs, result, lengths):
            operation = func._schema.name.partition("::")[2]
            raise ModelError(
                f"{kind_of(stack[-1])} mixes positions by other means than attention "
                f"({operation}): {CURE}"
            )

    descent = _Descent(note)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: object, **__: object
    ) -> Tensor:
        calls.append(stack[-1])
        if attn_mask is None or attn_mask not in descent:
            raise ModelError(f"the attention of {kind_of(stack[-1])} takes no mask: {CURE}")
        with no_dispatch_modes():
            return zeros_of(q, v)

    def make(example: PyTree) -> PyTree:
        tokens, documents, positions = inputs_like(example, length=length, device=device)
        descent.begin_with(documents)
        return tokens, documents, positions

    with named_calls(model, stack), torch.no_grad(), Interception(attend), descent:
        run(make)
    return len(calls)
