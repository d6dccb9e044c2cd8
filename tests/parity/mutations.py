"""The table of planted faults: where each one shows, and how `verify` must name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.parity import faults, size_faults, update_faults

Patches = Callable[[], list[Any]]


@dataclass(frozen=True)
class Mutation:
    """A fault: where it shows (plan, probe), what it is called (`cause`), and the axis or option to
    blame.

    `blamed` is what the smaller plans say: the axes without which the fault does not show; empty
    when one device has it.
    """

    name: str
    plan: str
    probe: str
    cause: str
    axis: str
    blamed: tuple[str, ...]
    patches: Patches
    model: str = "gpt"

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.patches():
                stack.enter_context(one)
            yield


DP = ("dp",)
MUTATIONS = [
    Mutation("no all-reduce", "dp2", "sgd", "missing-reduction", "dp", DP, faults.no_all_reduce),
    Mutation("reduced twice", "dp2", "sgd", "scale", "dp", DP, faults.reduce_twice),
    Mutation(
        "no reduce-scatter",
        "dp2:zero1",
        "sgd",
        "missing-reduction",
        "dp",
        DP,
        faults.no_reduce_scatter,
    ),
    Mutation(
        "no reduce-scatter, ZeRO-3",
        "dp2:zero3",
        "adamw",
        "missing-reduction",
        "dp",
        DP,
        faults.no_reduce_scatter,
    ),
    Mutation(
        "last bucket skipped",
        "dp2",
        "sgd",
        "missing-reduction",
        "dp",
        DP,
        faults.last_bucket_skipped,
    ),
    Mutation("half a ring", "dp2:ring", "sgd", "missing-reduction", "dp", DP, faults.half_a_ring),
    Mutation("a push lost", "dp4:server", "sgd", "dropped", "dp", DP, faults.a_push_lost),
    Mutation(
        "replicas of shards not summed",
        "dp4:zero3,replicate2",
        "sgd",
        "dropped",
        "dp",
        DP,
        faults.replicas_not_summed,
    ),
    Mutation(
        "scaled before the sum", "dp2", "clipping", "factor-by-dp", "dp", DP, faults.scaled_by_rank
    ),
    Mutation(
        "mean of means over micro-batches",
        "mb3",
        "uneven-tokens",
        "mean-of-means",
        "mb",
        ("mb",),
        faults.mean_of_micro_batches,
    ),
    Mutation(
        "mean of means over ranks",
        "dp2:server",
        "uneven-tokens",
        "mean-of-means",
        "dp",
        DP,
        faults.mean_of_ranks,
    ),
    Mutation("local divisor", "dp2", "sgd", "scale", "dp", DP, faults.local_divisor),
    Mutation(
        "times the micro-batches",
        "dp2 mb3",
        "sgd",
        "scale",
        "mb",
        ("mb",),
        faults.micro_batches_too_large,
    ),
    Mutation(
        "masked tokens counted", "dp2", "uneven-tokens", "count", "data", (), faults.masked_counted
    ),
    Mutation("reported loss", "dp2", "sgd", "loss-report", "dp", (), faults.loss_times_ranks),
    Mutation(
        "a micro-batch dropped",
        "dp2 mb3",
        "sgd",
        "dropped",
        "mb",
        ("mb",),
        faults.micro_batch_dropped,
    ),
    Mutation(
        "only the last micro-batch",
        "dp2:zero1 mb3",
        "sgd",
        "dropped",
        "mb",
        ("mb",),
        faults.only_the_last_micro_batch,
    ),
    Mutation(
        "later micro-batches twice",
        "dp2 mb3",
        "sgd",
        "doubled",
        "mb",
        ("mb",),
        faults.later_micro_batches_twice,
    ),
    Mutation(
        "remainder dropped", "dp2", "last-batch", "count", "data", DP, faults.remainder_dropped
    ),
    Mutation("same data on all ranks", "dp2", "sgd", "", "dp", DP, faults.same_data_on_all_ranks),
    Mutation(
        "same dropout everywhere",
        "dp2 mb2",
        "dropout",
        "",
        "dp",
        DP,
        faults.same_dropout_everywhere,
    ),
    Mutation(
        "norm counts replicas", "dp2", "clipping", "norm", "dp", DP, faults.norm_counts_replicas
    ),
    Mutation(
        "norm counts replicated shards",
        "dp4:zero1,replicate2",
        "clipping",
        "norm",
        "dp",
        DP,
        faults.norm_counts_replicated_shards,
    ),
    Mutation(
        "norm of its own shard", "dp2:zero2", "clipping", "norm", "dp", DP, faults.norm_of_own_shard
    ),
    Mutation("never clips", "dp2", "clipping", "clip", "clip", (), faults.never_clips),
    Mutation("wrong seed", "dp2:zero3", "sgd", "init", "init", (), update_faults.wrong_seed),
    Mutation("the rank's seed", "dp2", "sgd", "init", "init", DP, update_faults.seed_of_the_rank),
    Mutation("update twice", "dp2", "sgd", "learning-rate", "lr", (), update_faults.update_twice),
    Mutation(
        "rate of the next step",
        "dp2",
        "schedule",
        "learning-rate",
        "lr",
        (),
        update_faults.rate_of_the_next_step,
    ),
    Mutation(
        "gradients kept",
        "dp2",
        "sgd",
        "gradient-kept",
        "optimizer",
        (),
        update_faults.gradients_kept,
    ),
    Mutation(
        "no weight decay",
        "dp2",
        "sgd",
        "weight-decay",
        "optimizer",
        (),
        update_faults.no_weight_decay,
    ),
    Mutation(
        "moments mixed",
        "dp2:zero1",
        "adamw",
        "optimizer-state",
        "optimizer",
        (),
        update_faults.moments_of_another_shard,
    ),
    Mutation(
        "frozen moves",
        "dp2",
        "frozen-unused",
        "frozen-moved",
        "optimizer",
        (),
        update_faults.frozen_moves,
    ),
    Mutation(
        "unused decays",
        "dp2:zero1",
        "frozen-unused",
        "frozen-moved",
        "optimizer",
        (),
        update_faults.unused_decays,
    ),
    Mutation("untied", "dp2", "tied", "tied", "tied", (), update_faults.untied),
    Mutation("replicas drift", "dp2", "sgd", "replicas", "dp", DP, update_faults.replicas_drift),
    Mutation(
        "a bucket is not gathered",
        "dp2:zero1",
        "sgd",
        "replicas",
        "dp",
        DP,
        update_faults.gathers_too_little,
    ),
    *(
        Mutation(name, plan, "thresholds", "", "", blamed, planted, model)
        for name, plan, blamed, planted, model in (
            ("streamed panels", "tp4:2d", ("tp",), size_faults.streamed_panels, "even"),
            ("rings one by one", "cp4", ("cp",), size_faults.met_one_by_one, "even"),
            ("large all-reduce", "dp2", DP, size_faults.large_all_reduce, "gpt"),
            ("last segment", "dp2:ring", DP, size_faults.last_segment_lost, "gpt"),
            ("shared gradients", "tp2:1d,sp", ("tp",), size_faults.large_shared_gradients, "even"),
            ("chunks of experts", "mb2", (), size_faults.second_chunk_of_an_expert, "experts"),
            ("placed anew", "dp2 ep2", ("dp", "ep"), size_faults.placed_anew, "placed"),
        )
    ),
    Mutation(
        "stale gather", "dp2:zero3", "sgd", "stale-weights", "dp", DP, update_faults.stale_gather
    ),
]
BY_NAME = {one.name: one for one in MUTATIONS}
