"""Follows tensors of a kind through the functions of torch that a loss calls.

A function may make what a plan that cuts batches computes otherwise. Its results are noted, and
what is made of them, as far as the loss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.engine.notes import Notes
from plait.values import PyTree

Kind = TypeVar("Kind")

CURVED: Final = frozenset(
    {
        *("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "pow", "square", "abs"),
        *("relu", "sigmoid", "log_sigmoid", "logsigmoid", "softplus", "tanh", "erf", "sin", "cos"),
        *("softmax", "log_softmax", "normalize", "norm", "cosine_similarity"),
        *("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    }
)
"""Functions of a mean whose results are no means any more."""

LIMITS: Final = frozenset(
    {
        *("clamp", "clamp_min", "clamp_max", "clip"),
        *("maximum", "minimum", "max", "min"),
    }
)
"""Functions that keep the larger or smaller of two numbers; also of counts, so as not to be 0."""


@dataclass(frozen=True)
class TorchCall(Generic[Kind]):
    """One call of a function of torch that got tensors of a kind.

    Attributes:
        args: the arguments by place.
        named: the arguments by name.
        kinds: the tensors of a kind among them, in their order; none of a call with mixed ones.
        made: the tensors of the result.
    """

    name: str
    args: Sequence[Any]
    named: Mapping[str, Any]
    kinds: Sequence[tuple[Tensor, Kind]]
    made: Sequence[Tensor]

    @property
    def first(self) -> Tensor:
        """The first tensor [...] of a kind."""
        return self.kinds[0][0]

    @property
    def kind(self) -> Kind:
        """The kind of the first tensor."""
        return self.kinds[0][1]

    def of(self, *kinds: Kind) -> list[Tensor]:
        """The tensors [...] of one of these kinds."""
        return [tensor for tensor, kind in self.kinds if kind in kinds]

    def tensors(self) -> list[Tensor]:
        """The tensors [...] among the arguments."""
        return _tensors_of((self.args, self.named))

    def argument(self, name: str, place: int = 1) -> Any:
        """The argument of a name or else at a place; None where the call has neither."""
        return self.named.get(name, self.args[place] if len(self.args) > place else None)


class LossFollower(TorchFunctionMode, Generic[Kind]):
    """Tensors of a kind, and those that a function mixed, with the name of the function.

    Attributes:
        known: the kinds of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = Notes[Kind]()
        self._mixed = Notes[str]()
        self._mixed_nodes: dict[object, str] = {}

    @abstractmethod
    def look(self, call: TorchCall[Kind]) -> None:
        """Note what a function of torch made of tensors [B, ...] of some kinds."""

    def look_at_all(self, call: TorchCall[Kind]) -> None:
        """Note what a function of torch made of any tensors that are not mixed, or of none."""

    def look_at_mixed(self, mixed: str, call: TorchCall[Kind]) -> str:
        """The function that results of mixed tensors are mixed by: the same, or a surer one."""
        return mixed

    def found(self, loss: PyTree) -> str:
        """The name of a function that mixed tensors and that a loss was computed by, if any."""
        tensors = _tensors_of(loss)
        names = self.mixed_names(tensors)
        if names or not self._mixed_nodes:
            return next(iter(names), "")
        seen: set[object] = set()
        left: list[Any] = [one.grad_fn for one in tensors]
        while left:
            node = left.pop()
            if node in self._mixed_nodes:
                return self._mixed_nodes[node]
            if node is not None and node not in seen:
                seen.add(node)
                left.extend(following for following, _ in node.next_functions)
        return ""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and look at what it does with tensors of a kind."""
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunction():
            mixed = self._mixed_by((args, named))
            kinds = [] if mixed else self._kinds((args, named))
        result = function(*args, **named)
        if not isinstance(function, type):
            with torch._C.DisableTorchFunction():
                call = TorchCall(_name(function), args, named, kinds, _tensors_of(result))
                if mixed:
                    mixed = self.look_at_mixed(mixed, call)
                    self.note_mixed(args[0] if call.name == "setitem" else result, mixed)
                    return result
                if kinds:
                    self.look(call)
                self.look_at_all(call)
        return result

    def _mixed_by(self, given: PyTree) -> str:
        """The name of the function that mixed one of the arguments, if any."""
        return next(iter(self.mixed_names(_tensors_of(given))), "")

    def mixed_names(self, tensors: Sequence[Tensor]) -> list[str]:
        """The names of the functions that mixed some of these tensors [...]."""
        names = (self._mixed.get(one) for one in tensors)
        return [name for name in names if name is not None]

    def note_mixed(self, result: PyTree, name: str) -> None:
        """Note that the tensors of a result were mixed by a function."""
        for leaf in _tensors_of(result):
            self._mixed.add(leaf, name)
            if leaf.grad_fn is not None:  # an autograd.Function hides what it computes from
                self._mixed_nodes[leaf.grad_fn] = name

    def _kinds(self, given: PyTree) -> list[tuple[Tensor, Kind]]:
        """The tensors among the arguments that are of a kind, in their order."""
        kinds = ((leaf, self.known.get(leaf)) for leaf in _tensors_of(given))
        return [(leaf, kind) for leaf, kind in kinds if kind is not None]


def is_of_a_distribution(frame: FrameType | None) -> bool:
    """Whether code of torch.distributions made a call, behind the modes that see it."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return module.startswith("torch.distributions.")


def _tensors_of(given: PyTree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def _name(function: Callable[..., Any]) -> str:
    """The name of a function, or of the property that it reads."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return str(name).strip("_")
