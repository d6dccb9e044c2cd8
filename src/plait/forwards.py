"""Forwards that an engine gives modules of its model, and what copies of these modules run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType

from torch import nn

from plait.torch_internals import is_of_plait
from plait.values import PyTree


def is_replaced(module: nn.Module) -> bool:
    """Whether a call of a module does not run the forward of its class alone.

    Its owner gave it a forward as an attribute, or its class has a `__call__` of its own. A forward
    that plait gave it is none of these.
    """
    own = vars(module).get("forward")
    is_given = own is not None and not is_of_plait(own)
    return is_given or type(module).__call__ is not nn.Module.__call__


def runs_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of a module of class `kind` runs the forward of that class alone."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and not is_replaced(module)
    )


def give_forward(module: nn.Module, run: Callable[..., PyTree]) -> None:
    """Let a module run `run`; its copies and pickles run what it ran before, with their own values.

    `copy.deepcopy` binds a method to the copy, and keeps a function. A function would go on to
    compute with the parameters of the module that it was made for.
    """
    before: Callable[..., PyTree] = module.forward

    def forward(owner: nn.Module, /, *args: PyTree, **named: PyTree) -> PyTree:
        if owner is module:
            return run(*args, **named)
        if isinstance(before, MethodType) and before.__self__ is module:
            return before.__func__(owner, *args, **named)
        return before(*args, **named)

    owner = inspect.Parameter("owner", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(before)
    parameters = [owner, *signature.parameters.values()]
    vars(forward)["__signature__"] = signature.replace(parameters=parameters)
    module.forward = MethodType(forward, module)
