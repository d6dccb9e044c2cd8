"""Lists of blocks inside a model whose hidden states are sequences, although its inputs are not.

A picture has no dim of positions. Its patches become a sequence before the first block. Each block
of such a list is called once. It gets hidden states [batch, positions, width] and returns others
of equal shape. A stage of a pyramid is no such block, but may hold a list of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.values import PyTree


@dataclass
class Doors:
    """The shapes of hidden states that blocks get and return, recorded in one forward.

    `shapes`: by the name of a block, one shape a call, empty where the block changes it.
    """

    model: nn.Module
    blocks: Sequence[str]
    shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a forward."""
        handles = [self.model.register_forward_pre_hook(self._begin)]
        for name in self._candidates():
            calls = self.shapes.setdefault(name, [])
            handles.append(
                self.model.get_submodule(name).register_forward_hook(
                    lambda _, args, kwargs, result, calls=calls: calls.append(
                        _kept((args, kwargs), result)
                    ),
                    with_kwargs=True,
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def lists(self) -> list[tuple[list[str], int]]:
        """The lists of blocks that keep their hidden states' shape, and the number of positions.

        Those with the most parameters come first.
        """
        lists: dict[str, list[str]] = {}
        for name in self.shapes:
            lists.setdefault(name.rpartition(".")[0], []).append(name)
        found = []
        for names in lists.values():
            shapes = {shape for name in names for shape in self.shapes[name]}
            if len(shapes) == 1 and all(len(self.shapes[name]) == 1 for name in names):
                shape = shapes.pop()
                if shape:
                    found.append((names, shape[1]))
        return sorted(found, key=lambda one: -self._num_parameters(one[0]))

    def _candidates(self) -> list[str]:
        """The blocks, and the entries of lists inside them; not those inside of entries again."""
        names = list(self.blocks)
        for block in self.blocks:
            for name, module in self.model.get_submodule(block).named_modules(prefix=block):
                inside = any(name.startswith(f"{other}.") for other in names[len(self.blocks) :])
                if isinstance(module, nn.ModuleList) and not inside:
                    names += [f"{name}.{key}" for key, _ in module.named_children()]
        return list(dict.fromkeys(names))

    def _begin(self, *_: object) -> None:
        for calls in self.shapes.values():
            calls.clear()

    def _num_parameters(self, names: Sequence[str]) -> int:
        return sum(p.numel() for name in names for p in self.model.get_submodule(name).parameters())


def _kept(inputs: PyTree, result: PyTree) -> tuple[int, ...]:
    """The shape of the hidden states that a block gets and gives; empty where they differ."""
    first, last = _hidden(inputs), _hidden(result)
    return first if first == last else ()


def _hidden(values: PyTree) -> tuple[int, ...]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim() == 3 and leaf.is_floating_point():
            return tuple(leaf.shape)
    return ()
