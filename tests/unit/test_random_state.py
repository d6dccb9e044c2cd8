"""Ranks that are threads draw one after another, each from its own seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread

import torch

from plait.parallel.pipeline.payload import RandomState
from plait.random_state import IsolatedRandom, drawn_alone


def draws(seed: int) -> list[float]:
    with drawn_alone(seed):
        return [float(torch.rand(())) for _ in range(300)]


def test_threads_draw_what_each_would_draw_alone() -> None:
    alone = [draws(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(draws, range(8))) == alone


def test_a_pipeline_that_begins_a_step_disturbs_no_start_of_another_rank() -> None:
    alone = draws(3)
    with torch.random.fork_rng(devices=[]):
        steps = Thread(target=RandomState(torch.device("cpu")).seed, args=(5,))
        with drawn_alone(3):
            drawn = [float(torch.rand(())) for _ in range(150)]
            steps.start()
            steps.join(timeout=0.1)
            drawn += [float(torch.rand(())) for _ in range(150)]
        steps.join()
    assert drawn == alone


def test_the_state_of_the_process_stays() -> None:
    before = torch.get_rng_state()
    draws(3)
    assert torch.equal(torch.get_rng_state(), before)


def isolated(seed: int) -> list[float]:
    with IsolatedRandom(seed) as random:
        numbers = [float(torch.nn.functional.dropout(torch.ones(9)).sum()) for _ in range(100)]
        assert random.num_draws == 100
    return numbers


def test_an_isolated_stream_is_that_of_its_seed_and_disturbs_nobody() -> None:
    before = torch.get_rng_state()
    alone = [isolated(seed) for seed in range(4)]
    values = draws(7)
    with ThreadPoolExecutor(8) as threads:
        streams = threads.map(isolated, [*range(4)] * 8)
        made = threads.map(draws, [7] * 8)
        assert list(streams) == alone * 8
        assert list(made) == [values] * 8
    assert torch.equal(torch.get_rng_state(), before)


def test_operations_that_may_draw_and_do_not_are_not_counted() -> None:
    query = torch.ones(1, 2, 4, 8)
    with IsolatedRandom(0) as random:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        torch.rand(3, generator=torch.Generator().manual_seed(1))
        assert random.num_draws == 0


def test_ranks_may_meet_while_they_draw() -> None:
    meeting = Barrier(2, timeout=10)

    def rank() -> float:
        with IsolatedRandom(3):
            first = torch.rand(())
            meeting.wait()
            return float(first + torch.rand(()))

    with ThreadPoolExecutor(2) as threads:
        one, other = [threads.submit(rank) for _ in range(2)]
    assert one.result() == other.result()
