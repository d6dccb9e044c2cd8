"""The fit of latency and rate, and the shape of what the probe returns."""

from __future__ import annotations

import json

import pytest
import torch

from plait.comm.probing import OPS, SIZES_BYTES, fit, probe
from tests.helpers.threaded import threaded


def test_an_exact_line_is_found():
    latency, rate = fit([(b, 1e-4 + b / 2e9) for b in (1 << 10, 1 << 16, 1 << 24)])
    assert latency == pytest.approx(1e-4)
    assert rate == pytest.approx(2e9)


def test_noise_never_gives_a_negative_number():
    latency, rate = fit([(1000, 2e-3), (2000, 1e-3)])
    assert latency >= 0
    assert rate > 0


def test_the_probe_measures_every_operation_and_leaves_the_ledger(monkeypatch):
    monkeypatch.setattr("plait.comm.probing.SIZES_BYTES", SIZES_BYTES[:3])
    monkeypatch.setattr("plait.comm.probing.probe_device", lambda device: {"kind": device.type})

    def run(world):
        world.axis("dp").all_reduce(torch.ones(4)).wait()
        result = probe(world, ["dp", "tp"])
        assert world.ledger.num() == 1
        return result

    for result in threaded(3, run):
        assert list(result["axes"]) == ["dp"]
        assert result["axes"]["dp"]["size"] == 3
        assert set(result["axes"]["dp"]["ops"]) == set(OPS)
        for measured in result["axes"]["dp"]["ops"].values():
            assert measured["bytes_per_second"] > 0
            assert measured["latency_seconds"] >= 0
            assert len(measured["points"]) == 3
        json.dumps(result)


def test_the_door_of_the_room_gives_functions_however_often_it_is_asked():
    import plait.comm

    for _ in range(2):
        for name in plait.comm.__all__:
            assert not isinstance(getattr(plait.comm, name), type(plait.comm))
