"""The ledger: totals by axis and operation, and the traffic of a stretch."""

from __future__ import annotations

import json

from plait.comm.ledger import CONTROL, Count, Ledger


def test_totals_and_stretches():
    ledger = Ledger()
    ledger.add("dp", "all_reduce", 100)
    before = ledger.copy()
    ledger.add("dp", "all_reduce", 50)
    ledger.add("dp", "all_gather", 5, 3)
    ledger.add("tp", "all_reduce", 7)
    assert (ledger.num(), ledger.bytes()) == (4, 162)
    assert (ledger.num("dp"), ledger.bytes("dp"), ledger.bytes(op="all_reduce")) == (3, 155, 157)
    assert (ledger.padding_bytes(), ledger.padding_bytes("tp")) == (3, 0)
    assert ledger.since(before).counts == {
        ("dp", "all_gather"): Count(1, 5, 3),
        ("dp", "all_reduce"): Count(1, 50),
        ("tp", "all_reduce"): Count(1, 7),
    }
    assert json.loads(json.dumps(ledger.as_dict()))["dp"]["all_gather"] == {
        "num": 1,
        "bytes": 5,
        "padding_bytes": 3,
    }
    ledger.clear()
    assert ledger.bytes() == 0
    assert before.bytes() == 100


def test_by_axis_leaves_control_out_and_joins_sub_axes():
    ledger = Ledger()
    ledger.add("dp_shard", "all_gather", 5)
    ledger.add("dp_replicate", "all_reduce", 7)
    ledger.add("dp", CONTROL, 8)
    ledger.add("tp", "all_reduce", 1)
    assert ledger.by_axis() == {"dp": 12, "tp": 1}
