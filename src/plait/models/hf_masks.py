"""The masks that a library's model is given: windows, and documents of packed sequences.

The library would make them of activations, which may be parts of a sequence. So they are made
here, for whole sequences. Shapes: B samples, S positions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.models.layers import document_mask
from plait.torch_internals import is_recorded
from plait.values import PyTree


def masks_of(
    config: Any, input_ids: Tensor, dtype: torch.dtype, documents: Tensor | None
) -> PyTree:
    """The masks for token numbers [B, S]: None where the library's causal one is meant, else [B, 1,
    S, S].

    A table has a mask for each kind of layer. `documents` [B, S]: the document of each token, which
    sees no other. Raises `ModelError` for attention that such masks do not reach.
    """
    windows = _windows(config, input_ids, dtype)
    if documents is None:
        return windows
    kind = getattr(config, "_attn_implementation", None)
    if kind != "sdpa":
        raise ModelError(
            "documents of packed sequences are kept apart by a mask of "
            f"scaled_dot_product_attention, and this {config.model_type} computes attention by "
            f"{kind!r}; leave packing out"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < input_ids.shape[1]:
        raise ModelError(
            f"a {config.model_type} attends in chunks of attention_chunk_size = {chunk}, which a "
            f"mask of documents would replace; set seq_len = {chunk} or less, or leave packing out"
        )
    return _within_documents(windows, document_mask(documents))


_IN_ONE_PIECE: ContextVar[bool] = ContextVar("in_one_piece", default=False)


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Have the library take each sample for one sequence, as it is.

    It would look at the positions for several, and the host would wait for a GPU to know.
    """
    _look_only_elsewhere()
    token = _IN_ONE_PIECE.set(True)
    try:
        yield
    finally:
        _IN_ONE_PIECE.reset(token)


@functools.cache
def _look_only_elsewhere() -> None:
    """Let the library look at positions outside of `in_one_piece` alone.

    Within it, a mask that nobody gave is none while a CUDA graph is recorded, as at any other time.
    Earlier versions make one then (5.17), and attention takes another kernel.
    """
    from transformers import masking_utils

    library: Any = masking_utils
    look = getattr(library, "find_packed_sequence_indices", None)
    if look is None:  # a version that does not look
        return

    @functools.wraps(look)
    def looking(position_ids: Tensor) -> Tensor | None:
        found: Tensor | None = None if _IN_ONE_PIECE.get() else look(position_ids)
        return found

    library.find_packed_sequence_indices = looking
    is_tracing = getattr(library, "is_tracing", None)
    if is_tracing is None:
        return

    @functools.wraps(is_tracing)
    def tracing(tensor: Tensor | None = None) -> bool:
        is_whole = tensor is None and _IN_ONE_PIECE.get()
        if is_whole and is_recorded():
            return False
        found: bool = is_tracing(tensor)
        return found

    library.is_tracing = tracing


def _within_documents(masks: PyTree, own: Tensor) -> PyTree:
    """Masks of booleans, None or a table of them, where no token sees another document's."""
    if isinstance(masks, Mapping):
        return {kind: _within_documents(mask, own) for kind, mask in masks.items()}
    return own if masks is None else masks & own


def _windows(config: Any, input_ids: Tensor, dtype: torch.dtype) -> PyTree:
    """The masks of attention within a window; None where no window is shorter than a sequence."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= input_ids.shape[1]:
        return None
    from transformers import masking_utils

    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    like = torch.empty((*input_ids.shape, 0), dtype=dtype, device=input_ids.device)
    known = {
        "config": config,
        "inputs_embeds": like,
        "input_embeds": like,
        "attention_mask": None,
        "past_key_values": None,
        "cache": None,
        "position_ids": positions,
        "cache_position": positions[0],
    }
    make: Any = masking_utils.create_sliding_window_causal_mask
    keys = {key: known[key] for key in inspect.signature(make).parameters if key in known}
    if getattr(config, "layer_types", None) is None:
        return make(**keys)
    return {
        "full_attention": masking_utils.create_causal_mask(**keys),
        "sliding_attention": make(**keys),
    }
