"""The forwards that modules run: those of their classes, or others that an engine gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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


def computes_by_heads(module: nn.Module, size: int) -> bool:
    """Whether `size` ranks can have some heads each of torch's attention.

    Its keys and values have the width of its queries, it adds none, and the ranks divide its heads.
    """
    if not runs_forward_of(module, nn.MultiheadAttention):
        return False
    assert isinstance(module, nn.MultiheadAttention)
    has_one_width = module._parameters.get("in_proj_weight") is not None
    adds_keys = module._parameters.get("bias_k") is not None or module.add_zero_attn
    return has_one_width and not adds_keys and module.num_heads % size == 0


def run_under(module: nn.Module, mode: Callable[[], AbstractContextManager[object]]) -> None:
    """Let the forward of a module run under a mode of torch, a new one for each call."""
    before = module.forward

    def run(*args: PyTree, **named: PyTree) -> PyTree:
        with mode():
            return before(*args, **named)

    give_forward(module, run)


@contextmanager
def with_forwards(
    forwards: Sequence[tuple[nn.Module, Callable[..., PyTree]]],
) -> Iterator[None]:
    """Let each of these modules run another forward for a while, and then its own again."""
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own


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
