"""Owners of whole matrices: balanced, among those who hold a part, and counted."""

from __future__ import annotations

import math

from plait.mesh.boxes import Box
from plait.mesh.matrices import MatrixPlace, newton_schulz_multiplications, share_matrices


def part(name: str, shape: tuple[int, int], index: int, parts: int) -> MatrixPlace:
    each = math.prod(shape) // parts
    return MatrixPlace(name, shape, Box.whole(shape), index * each, (index + 1) * each)


def test_newton_schulz_counts_two_products_with_the_matrix_and_a_square():
    assert newton_schulz_multiplications(4, 10) == 5 * (2 * 4 * 4 * 10 + 64)
    assert newton_schulz_multiplications(10, 4) == newton_schulz_multiplications(4, 10)


def test_equal_matrices_go_to_ranks_in_turn():
    names = ("a", "b", "c", "d")
    work = share_matrices([[part(name, (8, 8), rank, 2) for name in names] for rank in (0, 1)])
    assert [work.split[name].owner for name in names] == [0, 1, 0, 1]
    assert work.multiplications[0] == work.multiplications[1]


def test_a_rank_sends_its_parts_and_the_results_of_those_that_it_owns():
    work = share_matrices([[part(name, (8, 8), rank, 2) for name in "ab"] for rank in (0, 1)])
    assert [work.sent_numbers(rank) for rank in (0, 1)] == [64, 64]


def test_a_matrix_on_one_rank_does_not_travel():
    work = share_matrices([[part("a", (8, 8), 0, 1)], [part("b", (8, 8), 0, 1)]])
    assert not work.split
    assert work.multiplications == (newton_schulz_multiplications(8, 8),) * 2


def test_copies_are_sent_once_and_returned_to_all():
    halves = [[part("a", (8, 8), rank % 2, 2)] for rank in range(4)]
    work = share_matrices(halves)
    assert work.split["a"].owner == 0
    assert [work.sent_numbers(rank) for rank in range(4)] == [3 * 32, 32, 0, 0]


def test_matrices_that_no_one_wants_have_no_owner_and_no_load():
    places = [[part(name, (8, 8), rank, 2) for name in "ab"] for rank in (0, 1)]
    work = share_matrices(places, lambda name: name == "b")
    assert set(work.split) == {"b"}
    assert work.split["b"].owner == 0
