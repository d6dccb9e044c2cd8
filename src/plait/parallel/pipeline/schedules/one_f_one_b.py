"""1F1B (PipeDream-Flush): p - stage - 1 forwards to fill the pipeline, then a forward and a
backward in turn, then drain.

Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (arXiv 2006.09503), figure 4;
Megatron-LM (arXiv 2104.04473), figure 4, top. The bubble of GPipe with the activations of p - stage
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.parallel.pipeline.actions import Action, Schedule, backward, forward, straight
from plait.parallel.pipeline.schedules.registry import generates


def alternate(forwards: list[Action], backwards: list[Action], num_warmup: int) -> Iterator[Action]:
    """`num_warmup` forwards, then a forward and a backward in turn, then the backwards that are
    left.
    """
    warmup = min(num_warmup, len(forwards))
    yield from forwards[:warmup]
    for index, action in enumerate(backwards):
        yield from forwards[warmup + index : warmup + index + 1]
        yield action


@generates("1f1b")
def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021, arXiv 2006.09503, figure 4). Bubble (p-1)/(m+p-1); min(m, p -
    stage) live activations.
    """

    def rank_actions(stage: int) -> tuple[Action, ...]:
        forwards = [forward(stage, j) for j in range(num_micro_batches)]
        backwards = [backward(stage, j) for j in range(num_micro_batches)]
        return tuple(alternate(forwards, backwards, num_ranks - stage - 1))

    return Schedule(
        "1f1b", straight(num_ranks), num_micro_batches, tuple(map(rank_actions, range(num_ranks)))
    )
