"""Bytes by axis, against formulae worked out by hand."""

import pytest

import plait
from plait.predict.cost import Runtime, describe
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.messages import block_messages
from tests.unit.predict.cost.shapes import GPT, MIXTRAL, config

N = 4
M = 8


def traffic(plan, runtime=None, **keys):
    return plait.estimate(
        config(GPT, seq_len=256, **keys), plan=plan, cluster="h100x64", runtime=runtime or Runtime()
    ).traffic


@pytest.mark.parametrize(
    ("strategy", "times"),
    [
        ("allreduce", 2),
        ("ring", 2),
        ("zero1", 2),
        ("zero2", M + 1),
        ("zero3", 3 * M),
    ],
)
def test_the_data_family(strategy, times):
    weights = 4 * describe(GPT, 256).parameters
    got = traffic(f"dp{N}:{strategy} mb{M}")["dp"]
    assert got == pytest.approx(times * (N - 1) / N * weights, rel=1e-6)


def test_tensor_1d_reduces_two_activations_a_layer_each_way_and_the_embedding_and_the_head():
    tokens = 8 * 256
    hidden = 512
    layers = 8
    t = 4
    got = traffic("tp4", global_batch=8)["tp"]
    reduce = 2 * (t - 1) / t * 4
    loss = (t - 1) / t * 4 * t * 3 * tokens  # three numbers a token of each rank, gathered
    expected = reduce * tokens * hidden * (4 * layers + 2) + loss
    assert got == pytest.approx(expected, rel=1e-6)


def test_sequence_parallel_moves_the_same_bytes_and_what_its_ranks_share_once_a_step():
    kept = Runtime(keep_gathered=True)
    plain = traffic("tp4", kept, global_batch=8)["tp"]
    sharded = traffic("tp4:1d,sp", kept, global_batch=8)["tp"]
    positions = 1024 * 512
    norms = 17 * 2 * 512
    biases = 8 * 2 * 512  # of rows; biases of columns are cut
    assert sharded - plain == pytest.approx(2 * 3 / 4 * 4 * (positions + norms + biases), rel=1e-6)


def test_a_framework_that_gathers_again_moves_one_more_for_each_kept_input():
    keys = config(GPT, seq_len=256, global_batch=8)
    once, again = (
        plait.estimate(
            keys, plan="tp4:1d,sp", cluster="h100x64", runtime=Runtime(keep_gathered=kept)
        ).traffic["tp"]
        for kept in (True, False)
    )
    assert again - once == pytest.approx((4 - 1) / 4 * 4 * 8 * 256 * 512 * (2 * 8 + 1), rel=1e-6)


@pytest.mark.parametrize(("fused", "sums"), [(True, 2), (False, 1)])
def test_full_recomputation_repeats_the_forward_communication_of_blocks_but_for_a_last_sum_apart(
    fused, sums
):
    runtime = Runtime(fused_rows=fused)
    once = traffic("tp4", runtime, global_batch=8)["tp"]
    again = traffic("tp4 remat:full", runtime, global_batch=8)["tp"]
    assert again - once == pytest.approx(sums * 2 * 3 / 4 * 4 * 8 * 256 * 512 * 8, rel=1e-6)


def test_a_pipeline_rank_sends_activations_on_and_gradients_back():
    got = traffic("pp4 mb8", global_batch=8)["pp"]
    assert got == 2 * 8 * 256 * 512 * 4


def test_ring_attention_passes_keys_and_values_and_their_gradients():
    got = traffic("cp4", global_batch=1)["cp"]
    pair = 256 / 4 * 2 * 512 * 4
    assert got == pytest.approx(8 * pair * (3 + 2 * 3))


def test_experts_send_each_token_to_top_k_and_back_both_ways():
    block = next(block for block, _ in describe(MIXTRAL, 256).runs if block.num_experts)
    messages = [
        m for m in block_messages(block, Sharding(ep=8, seq_len=256), "bf16") if m.axis == "ep"
    ]
    assert sum(m.sent_bytes for m in messages) == pytest.approx(4 * 7 / 8 * 256 * 2 * 4096 * 2)


@pytest.mark.parametrize(("mode", "size", "depth"), [("2d", 16, 1), ("2.5d", 32, 2), ("3d", 64, 1)])
def test_grids_move_activations_that_shrink_with_the_grid(mode, size, depth):
    """Four times the ranks of 1D move as much for each of them; of a grid about half: 1/q of the
    activations.
    """
    block = describe(GPT, 4096).runs[1][0]
    q = 4
    small = Sharding(
        tp=size // (8 if mode == "3d" else 4),
        mode=mode,
        q=q // 2,
        depth=depth,
        seq_len=1024,
        samples=64,
    )
    large = Sharding(tp=size, mode=mode, q=q, depth=depth, seq_len=1024, samples=64)

    def sent(shard):
        return sum(m.sent_bytes for m in block_messages(block, shard, "bf16"))

    assert 0 < sent(large) < 0.8 * sent(small)
    assert sent(Sharding(tp=16, seq_len=65536)) > sent(Sharding(tp=4, seq_len=65536))
