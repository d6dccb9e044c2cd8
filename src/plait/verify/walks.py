"""Limits under which a small model takes the ways of a large one.

The code's own limits make a proof walk the paths of small tensors, these the paths of large ones.
There are as many ranks, panels and rounds, but of a few numbers each.
"""

from __future__ import annotations

from collections.abc import Mapping

SCALED: Mapping[str, int] = {
    "added_gradient_numel": 64,
    "all_reduce_bytes": 0,
    "context_keys": 1,
    "expert_chunk_rows": 3,
    "expert_step_rows": 2,
    "gloo_all_gather_bytes": 0,
    "gloo_all_reduce_bytes": 0,
    "gloo_direct_bytes": 0,
    "gloo_direct_parts": 0,
    "gloo_exchange_bytes": 0,
    "gloo_reduce_scatter_bytes": 0,
    "gradient_piece_bytes": 256,
    "grid_panel_bytes": 0,
    "hosts_bytes": 0,
    "memory_piece_bytes": 1024,
    "product_multiplications": 1,
    "product_rows": 1,
    "product_summed": 1,
    "ring_segment_bytes": 64,
    "shared_gradient_numel": 0,
    "sum_block_bytes": 64,
    "vocabulary_numel": 64,
}
