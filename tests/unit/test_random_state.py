"""Ranks that are threads draw one after another, each from its own seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from plait.random_state import drawn_alone


def draws(seed: int) -> list[float]:
    with drawn_alone(seed):
        return [float(torch.rand(())) for _ in range(300)]


def test_threads_draw_what_each_would_draw_alone() -> None:
    alone = [draws(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(draws, range(8))) == alone


def test_the_state_of_the_process_stays() -> None:
    before = torch.get_rng_state()
    draws(3)
    assert torch.equal(torch.get_rng_state(), before)
