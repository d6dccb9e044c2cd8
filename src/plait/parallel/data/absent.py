"""Parameters whose numbers are not on this rank: those that ZeRO-3 has freed, and those of the
stages of other ranks.

Such a parameter keeps its shape. A read of one would go past the end of freed memory, or give
zeros. So it has another class for as long, which torch asks before each function.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Kind = TypeVar("Kind", bound=Tensor)
Wanted = Callable[[Tensor], None]
"""Gathers a parameter [...] whose numbers are wanted, or raises an error that says why."""

VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that are tensors of the same memory."""

DESCRIPTIONS = frozenset(
    {
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_shared", "is_tensor"),
        *("is_same_size", "is_storage", "element_size", "get_device", "result_type"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
        *("retain_grad", "untyped_storage", "storage", "data_ptr"),
        *("__hash__", "__len__", "is_pinned", "has_names", "is_inference", "is_conj", "is_neg"),
        *("backward", "grad", "_has_compatible_shallow_copy_type"),
    }
)
"""Functions that ask a parameter for its shape or its kind, or for its gradient."""

IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
    )
)
"""Operators such as `+=`, which write into a tensor."""

CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16"})
"""Functions that give a parameter back as it is, where it is so already."""


class Absent:
    """A parameter [...] without numbers. `wanted` is called before a function that reads them."""

    wanted: Wanted
    own: type[nn.Parameter]
    """The class of the parameter where its numbers are."""

    where: str
    """The place of the numbers, in a word or two."""

    @classmethod
    def kind(cls, kind: type[Kind], wanted: Wanted, **more: object) -> type[Kind]:
        """The class of a parameter of class `kind` while its numbers are absent.

        It has `more` class attributes by name.
        """
        members = {"wanted": staticmethod(wanted), "own": kind, "__module__": __name__, **more}
        return types.new_class(
            f"{cls.__name__}{kind.__name__}",
            (cls, kind),
            exec_body=lambda names: names.update(members),
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        kinds: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, after those parameters that it reads were gathered."""
        named = dict(kwargs or {})
        if not only_describes(function):
            if function.__name__ in CONVERSIONS and _changes_nothing(function, args, named):
                return args[0]
            for value in tree_leaves((args, named)):
                if isinstance(value, Absent):
                    type(value).wanted(value)  # type: ignore[arg-type]
        if not any(isinstance(value, Absent) for value in tree_leaves((args, named))):
            return function(*args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **named)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """The shape and the place: a debugger may ask."""
        shape = list(self.shape)  # type: ignore[attr-defined]
        return f"Parameter of shape {shape}, whose numbers are {self.where}"

    def __format__(self, spec: str) -> str:
        """The shape and the place in a text, for which torch would read the numbers."""
        return format(repr(self), spec)


def _changes_nothing(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> bool:
    """Whether a conversion leaves a parameter as it is, so that none of its numbers are read."""
    param = args[0]
    like = torch.empty(0, dtype=param.dtype, device=param.device)
    return function(like, *args[1:], **named) is like


def become(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Let a parameter be of a class: of its own, or of one that `Absent.kind` made of it."""
    param.__class__ = kind


def only_describes(function: Callable[..., Any]) -> bool:
    """Whether a function of torch reads no numbers of a parameter, but its shape or its kind."""
    name = function.__name__
    if name == "__get__":
        attribute: Any = function
        return attribute.__self__.__name__ not in VIEWS
    return name in DESCRIPTIONS or name in ("__set__", "__delete__")


def writes(function: Callable[..., Any]) -> bool:
    """Whether a function of torch writes into its first argument, as `mul_` and `data = values`."""
    name = function.__name__
    if name == "__set__":
        attribute: Any = function
        return attribute.__self__.__name__ == "data"
    if name.startswith("__"):
        return name == "__setitem__" or name in IN_PLACE_OPERATORS
    return name.endswith("_") and name not in DESCRIPTIONS


def same_numbers(function: Callable[..., Any]) -> bool:
    """Whether a function of torch gives a tensor of the same numbers, as `data` and `detach`."""
    name = function.__name__
    if name == "__get__":
        attribute: Any = function
        return attribute.__self__.__name__ == "data"
    return name == "detach"
