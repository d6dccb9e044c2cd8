"""DualPipeV: two stages a rank in the shape of a V, a forward beside a backward wherever both are
there.

DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, and "DualPipe could be better without the Dual" (the
V of half the ranks). The pairs are neighbours in the list. A runtime may overlap the communication
of one with the computing of the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from plait.parallel.pipeline.actions import (
    Action,
    Schedule,
    backward,
    forward,
    input_grad,
    vee,
    weight_grad,
)
from plait.parallel.pipeline.schedules.registry import generates


@generates("dualpipev")
def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """DualPipe's V (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), for m >= 2p.

    Bubble (p-1)(F&B + B - 3W) in half-stage units; at most 2p+1 live half-activations a rank.
    """
    ranks = tuple(tuple(_rank(num_ranks, num_micro_batches, rank)) for rank in range(num_ranks))
    return Schedule("dualpipev", vee(num_ranks), num_micro_batches, ranks)


def _rank(num_ranks: int, num_micro_batches: int, rank: int) -> Iterator[Action]:
    down = rank
    up = 2 * num_ranks - 1 - rank
    f0, f1 = (iter([forward(stage, j) for j in range(num_micro_batches)]) for stage in (down, up))
    b0, b1 = (iter(range(num_micro_batches)) for _ in range(2))
    below = num_ranks - rank - 1
    weight_grads = deque[Action]()

    def split(stage: int, micro_batch: int) -> Action:
        weight_grads.append(weight_grad(stage, micro_batch))
        return input_grad(stage, micro_batch)

    for _ in range(2 * below):  # 1. fill downwards
        yield next(f0)
    for _ in range(rank + 1):  # 2. fill both ways
        yield from (next(f0), next(f1))
    for _ in range(below):  # 3. first gradients, as early as they can be
        yield from (split(up, next(b1)), weight_grads.popleft(), next(f1))
    for _ in range(
        num_micro_batches - 2 * num_ranks + rank + 1
    ):  # 4. steady: a forward beside a backward, twice
        yield from (next(f0), backward(up, next(b1)), next(f1), backward(down, next(b0)))
    for _ in range(below):  # 5. the last forwards
        yield from (backward(up, next(b1)), next(f1), backward(down, next(b0)))
    for index in range(
        2 * (rank + 1)
    ):  # 6. drain; from half way on weight gradients are kept for step 7
        stage, rest = (up, b1) if index % 2 == 0 else (down, b0)
        yield (backward if index <= rank else split)(stage, next(rest))
    for _ in range(below):  # 7. a kept weight gradient while the next input gradient travels
        yield weight_grads.popleft()
        yield split(down, next(b0))
    yield from weight_grads  # 8. what is left
