"""Whether an operation of torch mixes the positions of a sequence, by the shapes it meets.

Positions are known by their number, which no other dim of a model has. What acts on each element,
on features, or only moves dims mixes nothing. Whatever is not known to leave
positions alone counts as mixing. A module too many with whole sequences costs time, one too few
would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from plait.values import PyTree

VIEWS = """
    view _unsafe_view reshape _reshape_alias permute transpose t numpy_T unsqueeze squeeze
    expand alias detach clone contiguous _to_copy to copy_ lift_fresh lift unflatten stack
    repeat movedim zero_ zeros_like ones_like empty_like full_like new_zeros new_ones new_empty
    new_full empty_strided new_empty_strided zeros ones full empty scalar_tensor fill_ fill
    resize_ _local_scalar_dense is_same_size expand_as view_as native_dropout dropout rand_like
    randn_like bernoulli_ masked_fill_ diagonal repeat_interleave real imag view_as_complex
    view_as_real _conj _linear linear rms_norm _fused_rms_norm native_layer_norm embedding glu
"""
# May make dims of positions without a value that depends on them.
PLAIN = """
    empty zeros ones full new_empty new_zeros new_ones new_full empty_strided new_empty_strided
    expand repeat view _unsafe_view
"""
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "mv": 0}  # the first factor


def mixes(
    func: OpOverload, args: Sequence[PyTree], kwargs: PyTree, result: PyTree, lengths: set[int]
) -> bool:
    """Whether `func` makes a value of one position from others; dims of `lengths` are sequences."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    meets = [_count(tensor, lengths) for tensor in inputs]
    makes = [_count(tensor, lengths) for tensor in results]
    if not any(meets) and not any(makes):
        return False
    name = func._schema.name.partition("::")[2]
    if max(makes, default=0) > max(meets, default=0):
        return name not in PLAIN.split()
    if torch.Tag.pointwise in func.tags:
        return False
    if name in PRODUCTS:
        return args[PRODUCTS[name]].shape[-1] in lengths
    if name in VIEWS.split():
        return name in ("native_layer_norm", "_fused_rms_norm") and _normalises(args, lengths)
    return _along(func, name, args, kwargs, results, lengths)


def draws(name: str, args: Sequence[PyTree]) -> bool:
    """Whether an operation draws random numbers."""
    if name in ("native_dropout", "dropout"):
        return bool(args[1])
    return name.startswith(("bernoulli", "rand", "normal", "uniform", "exponential", "multinomial"))


def _count(tensor: Tensor, lengths: set[int]) -> int:
    return sum(size in lengths for size in tensor.shape)


def _normalises(args: Sequence[PyTree], lengths: set[int]) -> bool:
    shape = args[1] if isinstance(args[1], (list, tuple)) else ()
    return any(size in lengths for size in shape)


def _along(  # noqa: PLR0917
    func: OpOverload,
    name: str,
    args: Sequence[PyTree],
    kwargs: PyTree,
    results: Sequence[Tensor],
    lengths: set[int],
) -> bool:
    """Operations along some dims: reductions, scans, slices, concatenations, sorts."""
    arguments = dict(
        zip([argument.name for argument in func._schema.arguments], args, strict=False)
    )
    arguments |= kwargs or {}
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        source = arguments["self"]
        pairs = zip(source.shape, arguments["indices"], strict=False)
        return any(index is not None and size in lengths for size, index in pairs)
    if name == "convolution":
        weight = arguments["weight"]
        spatial = arguments["input"].shape[2:]
        kernels = weight.shape[2:]
        return any(k > 1 and size in lengths for size, k in zip(spatial, kernels, strict=False))
    if name == "constant_pad_nd":
        ends = list(arguments["pad"])
        padded = [any(ends[index : index + 2]) for index in range(0, len(ends), 2)]
        sizes = reversed(arguments["self"].shape)
        return any(size in lengths and pads for size, pads in zip(sizes, padded, strict=False))
    tensors = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]
    if not tensors or not {"dim", "dims"} & {argument.name for argument in func._schema.arguments}:
        return True
    dims = arguments.get("dim", arguments.get("dims", _default(func)))
    listed = [dims] if isinstance(dims, int) else dims
    source = tensors[0]
    every = range(source.dim()) if not listed and listed != [0] else listed
    touched = [dim for dim in every if source.dim() and source.shape[dim] in lengths]
    if name == "slice" and touched:
        return results[0].shape != source.shape
    return bool(touched)


def _default(func: OpOverload) -> PyTree:
    for argument in func._schema.arguments:
        if argument.name in ("dim", "dims"):
            return argument.default_value
    return None
