"""What `plait probe` makes of what was measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from plait.cluster import Cluster
from plait.errors import ConfigError
from plait.predict.probe import measure
from plait.predict.probe.measure import summary
from plait.predict.probe.saved import check_writable


def measured(num_devices: int = 2) -> dict[str, Any]:
    link = {"latency_seconds": 2e-5, "bytes_per_second": 5e9, "points": []}
    axes = {
        "world": {
            "size": num_devices,
            "ops": {"all_reduce": link, "send": {**link, "latency_seconds": 0.0}},
        }
    }
    rates = {"float32": 2e10, "bfloat16": 4e10}
    return {
        "name": "some processor",
        "num_devices": num_devices,
        "memory_bytes": 8 * 10**9,
        "device": {
            "kind": "cpu",
            "matmul_flops_per_second": rates,
            "memory_bytes_per_second": 1e10,
        },
        "axes": axes if num_devices > 1 else {},
    }


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_probe_is_a_cluster(num_devices: int) -> None:
    cluster = Cluster.local(summary(measured(num_devices)))
    assert cluster.num_devices == num_devices
    assert cluster.device.flops["bf16"] == 4e10
    assert cluster.node.bandwidth == (5e9 if num_devices > 1 else 1e10)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "probe.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(out)


def test_a_long_measurement_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(measured: object, say: object) -> tuple[dict[str, Any], float]:
        time.sleep(0.3)
        return {}, 0.0

    monkeypatch.setattr(measure, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(measure, "quietest", slow)
    measure.measure_here(None, 1)
    assert "plait probe: measuring this machine (0 s so far)" in capsys.readouterr().err
