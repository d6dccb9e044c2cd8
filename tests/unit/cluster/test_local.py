"""This machine as a cluster: the probe's file, its absence, and its damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cluster import Cluster, read_probe
from plait.errors import ClusterError

PROBE: dict[str, Any] = {
    "name": "two cores",
    "num_devices": 2,
    "peak_flops": {"float32": 5e10, "float64": 2.5e10, "bf16": 1e10},
    "memory_bytes": 8e9,
    "memory_bandwidth": 1e10,
    "link_bandwidth": 2e9,
    "link_latency_seconds": 5e-5,
}


def test_measured_rates_are_taken_as_they_are() -> None:
    cluster = Cluster.local(PROBE)
    assert (cluster.name, cluster.device.name, cluster.num_devices, cluster.num_nodes) == (
        "local",
        "two cores",
        2,
        1,
    )
    assert cluster.device.is_cpu and cluster.device.matmul_efficiency == 1
    assert cluster.device.peak_flops("float32") == 5e10
    assert (cluster.device.memory_bytes, cluster.device.memory_bandwidth) == (8e9, 1e10)
    assert (cluster.node.bandwidth, cluster.node.latency_seconds) == (2e9, 5e-5)
    assert cluster.price_per_hour == 0


@pytest.mark.parametrize("name", ["machine.json", "machine"])
def test_the_file_of_another_machine_is_a_cluster(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(PROBE))
    cluster = Cluster.parse(str(path))
    assert (cluster.name, cluster.device.name, cluster.num_devices) == (str(path), "two cores", 2)
    assert cluster.device.peak_flops("float32") == 5e10


def test_the_faults_of_such_a_file_are_told_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(ClusterError, match=r"machine\.json: this file is not there"):
        Cluster.parse(str(path))
    path.write_text('{"name": "two cores"}')
    with pytest.raises(ClusterError, match=r"machine\.json': the measurements are wrong"):
        Cluster.parse(str(path))
    path.write_text("[device]")
    with pytest.raises(ClusterError, match=r"machine\.json: the measurements cannot be read"):
        Cluster.parse(str(path))


def test_the_probe_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(PROBE))
    assert Cluster.parse("local", path) == Cluster.local(PROBE)


def test_a_machine_that_was_not_measured(tmp_path: Path) -> None:
    assert read_probe(tmp_path / "none.json") is None
    with pytest.raises(
        ClusterError,
        match="cluster 'local': this machine has not been measured yet; run plait probe",
    ):
        Cluster.parse("local", tmp_path / "none.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_damaged_probe_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ClusterError, match="run plait probe again"):
        Cluster.parse("local", path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes is -1 bytes for each device, which cannot be"),
        ({"num_devices": 0}, "num_devices is 0 devices"),
        ({"peak_flops": 5}, "peak_flops is missing, a table of flop/s with at least float32"),
        ({"peak_flops": {"float32": 0}}, "peak_flops.float32 is 0 flop/s"),
        (
            {"link_bandwidth": "fast"},
            "link_bandwidth must be a number of bytes/s for each device and direction, not 'fast'",
        ),
    ],
)
def test_impossible_measurements(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.local({**PROBE, **change})
    assert message in str(caught.value)


def test_missing_measurements_are_all_named() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.local({})
    for key in PROBE:
        assert (f"{key} is missing" in str(caught.value)) == (key != "name")
