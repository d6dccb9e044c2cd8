"""The table: complete, closed under the law of the backward, and with the bytes of the optimal
algorithms.
"""

from __future__ import annotations

import itertools

import pytest

from plait.comm.transitions import (
    COLLECTIVES,
    LOCAL,
    backward,
    bytes_sent,
    operation,
    transition_bytes,
    transition_bytes_backward,
)
from plait.errors import PlanError
from plait.mesh import Layout

LAYOUTS = [Layout.parse(text) for text in ("R", "I", "P", "S(0)", "S(1)")]

# the table of the design, row by row: forward, operation, backward, operation
ROWS = [
    ("I", "R", "none", "P", "I", "all_reduce"),
    ("P", "I", "all_reduce", "I", "R", "none"),
    ("P", "R", "all_reduce", "P", "R", "all_reduce"),
    ("S(0)", "R", "all_gather", "P", "S(0)", "reduce_scatter"),
    ("P", "S(0)", "reduce_scatter", "S(0)", "R", "all_gather"),
    ("S(0)", "I", "all_gather", "I", "S(0)", "slice"),
    ("S(0)", "S(1)", "all_to_all", "S(1)", "S(0)", "all_to_all"),
    ("I", "S(0)", "slice", "S(0)", "I", "all_gather"),
    ("R", "S(0)", "slice", "S(0)", "P", "pad"),
    ("R", "I", "none", "I", "P", "keep"),
    ("R", "P", "keep", "R", "P", "keep"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}->{row[1]}")
def test_rows(row):
    source = Layout.parse(row[0])
    target = Layout.parse(row[1])
    assert operation(source, target) == row[2]
    assert [str(layout) for layout in backward(source, target)] == [row[3], row[4]]
    assert operation(*backward(source, target)) == row[5]


def test_every_pair_has_an_operation_and_the_backward_of_the_backward_is_the_forward():
    for source, target in itertools.product(LAYOUTS, LAYOUTS):
        assert operation(source, target) in (*COLLECTIVES, *LOCAL)
        assert backward(*backward(source, target)) == (source, target)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_reduce", 1500),
        ("reduce_scatter", 750),
        ("all_gather", 750),
        ("all_to_all", 750),
        ("broadcast", 750),
        ("reduce", 750),
        ("send", 1000),
        ("shift", 1000),
        ("slice", 0),
        ("none", 0),
    ],
)
def test_bytes(op, expected):
    assert bytes_sent(op, 1000, 4) == expected
    assert bytes_sent(op, 1000, 1) == 0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for size in range(1, 9):
        for num_bytes in (0, 8 * size, 1024 * size):
            both = bytes_sent("reduce_scatter", num_bytes, size) + bytes_sent(
                "all_gather", num_bytes, size
            )
            assert bytes_sent("all_reduce", num_bytes, size) == both


def test_transition_bytes_are_of_the_global_tensor():
    s0, s1, r, p = (Layout.parse(text) for text in ("S(0)", "S(1)", "R", "P"))
    assert transition_bytes(s0, s1, 4096, 4) == 768  # each rank holds 1024 and keeps a quarter
    assert transition_bytes(s0, r, 4096, 4) == 3072
    assert transition_bytes_backward(s0, r, 4096, 4) == transition_bytes(p, s0, 4096, 4) == 3072


def test_an_unknown_operation_is_named():
    with pytest.raises(PlanError, match="no operation 'gossip'"):
        bytes_sent("gossip", 8, 2)
