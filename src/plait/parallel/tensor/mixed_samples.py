"""Whether a forward compares samples with each other, which grids give to different ranks.

The forward runs without values, on a prime number of samples that divides no other size in it. An
operation that adds up, sorts or multiplies along a dim of their multiples mixes samples. So does a
product that makes a second such dim. A sum over all elements is a loss of the model's own.
Dropout draws the mask of all ranks' samples along the first dim, so they must lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.errors import NotAvailable
from plait.origin import line_of, module_of, named
from plait.values import PyTree

COUNTS = (17, 19, 23, 29, 31, 37, 41, 43)
ALONG = """
    sum mean var std var_mean std_mean prod amax amin max min median norm linalg_vector_norm
    logsumexp _softmax softmax _log_softmax log_softmax cumsum cumprod cummax cummin logcumsumexp
    sort topk flip roll
"""
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "mv": 0, "dot": 0}  # the first factor


def refuse_mixed_samples(model: nn.Module, run: Callable[[int], object], plan_text: str) -> None:
    """Raise `NotAvailable` for a model whose forward compares samples.

    So too for a module of dropout whose input has them elsewhere than in its first dim.
    `run(n)` calls the model on n samples without values. A forward that makes tensors on the
    host runs again with those without values too. What cannot run so is not judged.
    """
    dropped: dict[str, str] = {}
    for made_on in (nullcontext(), torch.device("meta")):
        try:
            with torch.no_grad(), made_on:
                _watch_samples(model, run, dropped)
            break
        except _MixedError as found:
            line = line_of(found)
            name = module_of(model, found)
            where = "the forward" if not name else named(name)
            where = where if line is None else f"{where} at {line}, `{line.code}`,"
            raise NotAvailable(
                f"{where} compares samples with each other ({found}), and {plan_text} gives ranks "
                "other samples; use tpN:1d"
            ) from None
        except Exception:  # code of others, on numbers that are not there
            continue
    if dropped:
        name, where = next(iter(dropped.items()))
        raise NotAvailable(
            f"'{name}' (dropout) drops a tensor {where}, and {plan_text} gives ranks other "
            "samples; use tpN:1d, put samples first, or set its p to 0"
        )


def _watch_samples(model: nn.Module, run: Callable[[int], object], dropped: dict[str, str]) -> None:
    """Raise `_MixedError` where samples are compared, and note the dropout that moves them."""
    sizes = {size for tensor in model.state_dict().values() for size in tensor.shape}
    with _SizesMet(sizes):
        run(2)
    for count in COUNTS:
        if all(size % count for size in sizes if size):
            with _SamplesWatch(count), _dropout_watched(model, count, dropped):
                run(count)
            return


@contextmanager
def _dropout_watched(model: nn.Module, count: int, found: dict[str, str]) -> Iterator[None]:
    """Add the modules of dropout whose samples are not in the first dim, and where they are."""

    def note(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for x in inputs:
            if x.dim() == 0 or x.shape[0] % count:
                dims = [str(dim) for dim, size in enumerate(x.shape) if size % count == 0]
                at = f"whose samples are in dim {', '.join(dims)}"
                found[name] = at if dims else "without samples"

    handles = [
        module.register_forward_pre_hook(partial(note, name))
        for name, module in model.named_modules()
        if type(module) is nn.Dropout and module.p > 0
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _MixedError(BaseException):
    """Carries the name of the operation past code of a model that catches exceptions."""


class _SizesMet(TorchDispatchMode):
    """Adds the sizes of all results to a set."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, Tensor):
                self._sizes.update(leaf.shape)
        return result


class _SamplesWatch(TorchDispatchMode):
    """Raises at the first operation that mixes samples."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if self._multiplies(name, args, result) or self._goes_along(func, name, args, kwargs):
            raise _MixedError(name)
        return result

    def _of_samples(self, size: int) -> bool:
        return size > 0 and size % self._count == 0

    def _multiplies(self, name: str, args: PyTree, result: PyTree) -> bool:
        if name not in PRODUCTS:
            return False
        inner = args[PRODUCTS[name]].shape[-1]
        return self._of_samples(inner) or sum(map(self._of_samples, result.shape)) > 1

    def _goes_along(self, func: OpOverload, name: str, args: PyTree, kwargs: PyTree) -> bool:
        if name not in ALONG.split() or not args or not isinstance(args[0], Tensor):
            return False
        source = args[0]
        if not source.is_floating_point() and name != "cumsum":  # counts and orders of rows
            return False
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        dims = tree_leaves(given.get("dim", given.get("dims")))
        found = [dim for dim in dims if isinstance(dim, int) and source.dim()]
        return len(found) < source.dim() and any(self._of_samples(source.shape[d]) for d in found)
