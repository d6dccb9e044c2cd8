"""Cluster texts: presets, counts, files, and what is said to a name or a number that cannot be."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from plait.cluster import PRESETS, Cluster
from plait.errors import ClusterError

NAMES = [
    "v100-16gb",
    "v100-32gb",
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h200",
    "b200",
    "gb200",
    "gb300",
    "mi300x",
    "l40s",
    "rtx4090",
    "t4",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    *("b300", "h800", "a800", "h20", "gh200", "h100-pcie", "l4", "a10", "a6000", "rtx3090"),
    *("rtx5090", "mi250x", "mi325x", "mi355x", "ascend910b", "trainium2", "gaudi3", "tpu-v6e"),
]


OTHER_NODES = {
    **{"gb200": 72, "gb300": 72, "tpu-v4": 64, "tpu-v5e": 256, "t4": 4, "tpu-v5p": 64},
    **{"gh200": 4, "mi250x": 4, "trainium2": 16, "tpu-v6e": 256},
}


def refused(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text)
    return str(caught.value)


def test_the_presets_are_those_of_the_contract() -> None:
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_preset_is_a_whole_machine(name: str) -> None:
    cluster = Cluster.parse(name)
    assert cluster.num_devices == cluster.node.devices == OTHER_NODES.get(name, 8)
    assert cluster.num_nodes == 1
    for precision in ("bf16", "float32", "float64"):
        assert 1e11 <= cluster.device.peak_flops(precision) < 1e16
    assert (
        cluster.device.peak_flops("bf16")
        > cluster.device.peak_flops("float32")
        >= cluster.device.peak_flops("float64")
    )
    assert (
        0
        < cluster.network.bandwidth
        <= cluster.node.bandwidth * 1.01
        < cluster.device.memory_bandwidth
    )
    assert 0.1 < cluster.device.price_per_hour < 20
    assert cluster.device.matmul_efficiency is None or 0.5 < cluster.device.matmul_efficiency < 1
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(cluster) == hash(Cluster.parse(name))


def test_the_units_are_si() -> None:
    h100 = Cluster.parse("h100x64")
    assert (h100.name, h100.num_devices, h100.num_nodes) == ("h100x64", 64, 8)
    assert h100.device.peak_flops("bf16") == 989e12
    assert h100.device.memory_bytes == 80 * 2**30
    assert h100.device.memory_bandwidth == 3.35e12
    assert h100.node.bandwidth == 450e9
    assert h100.network.bandwidth == 50e9  # 400 Gb/s
    assert h100.network.latency_seconds == pytest.approx(3.7e-6)
    assert h100.price_per_hour == pytest.approx(64 * h100.device.price_per_hour)


@pytest.mark.parametrize(
    ("text", "count"),
    [("a100-80gbx256", 256), ("rtx4090x2", 2), ("mi300xx16", 16), (" h100x1 ", 1)],
)
def test_the_last_x_separates(text: str, count: int) -> None:
    assert Cluster.parse(text).num_devices == count


def test_mi300x_keeps_its_own_x() -> None:
    assert Cluster.parse("mi300x").num_devices == 8


def test_an_uneven_count_fills_the_last_node_partly() -> None:
    assert Cluster.parse("h100x12").num_nodes == 2
    assert Cluster.parse("h100x8").with_num_devices(4).num_devices == 4
    with pytest.raises(ClusterError, match="needs at least one device, not 0"):
        Cluster.parse("h100").with_num_devices(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10x", "cluster 'h10x': unknown preset 'h10x'; did you mean 'h100'?"),
        ("h1000x8", "cluster 'h1000x8': unknown preset 'h1000'; did you mean 'h100'?"),
        ("a100", "unknown preset 'a100'; did you mean a100-40gb or a100-80gb?"),
        ("A100x8", "did you mean a100-40gb or a100-80gb?"),
        ("H100x8", "did you mean 'h100'?"),
        ("abacus", "known: a10, a100-40gb, a100-80gb"),
        ("abacus", "a cluster is PRESETxCOUNT, the path of a TOML file, or local"),
        ("h100x", "'' is no number of devices; write h100x8 for eight"),
        ("h100x-8", "'-8' is no number of devices"),
        ("h100xmany", "'many' is no number of devices"),
        ("h100x99999999999", "is no number of devices"),
        ("h100x0", "h100x0: count is 0 devices, which cannot be; it must be between 1 and"),
        ("", "a cluster is PRESETxCOUNT, the path of a TOML file, or local, not ''"),
        ("nowhere.toml", "nowhere.toml: there is no such file"),
        ("no/where", "no/where: there is no such file"),
    ],
)
def test_names_that_cannot_be_read(text: str, message: str) -> None:
    assert message in refused(text)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_own_numbers_in_a_file_change_nothing(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    text = (
        f'[device]\npreset = "{name}"\npeak_tflops = {preset.bf16}\n'
        f"memory_gb = {preset.memory_gb}\nmemory_bandwidth_gbps = {preset.memory_bandwidth}\n"
        f"[node]\ndevices = {preset.devices}\nbandwidth_gbps = {preset.node_bandwidth}\n"
        f"[network]\nbandwidth_gbps_per_device = {preset.network}\n"
    )
    plain = Cluster.parse(name)
    own = Cluster.parse(write(tmp_path, text))
    assert own.node == plain.node and own.network == plain.network
    assert own.device.matmul_efficiency == plain.device.matmul_efficiency
    assert own.device.flops == pytest.approx(plain.device.flops)


def test_the_rate_of_two_devices_grows_with_that_of_all(tmp_path: Path) -> None:
    text = '[device]\npreset = "l40s"\n[node]\nbandwidth_gbps = 3.3\n'
    plain = Cluster.parse("l40s").node
    assert Cluster.parse(write(tmp_path, text)).node.pair_bandwidth == pytest.approx(
        1.5 * plain.pair_bandwidth
    )
    own = Cluster.parse(write(tmp_path, text + "pair_bandwidth_gbps = 20\n")).node
    assert own.pair_bandwidth == 20e9
    assert Cluster.parse(write(tmp_path, '[device]\npreset = "h100"\n')).node.pair_bandwidth == 0
    huge = Cluster.parse(write(tmp_path, text.replace("3.3", "99999")))
    assert huge.node.pair_bandwidth == 1e14


def test_a_file_overrides_a_preset(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'count = 32\n[device]\npreset = "h100"\npeak_tflops = 494.5\nmemory_gb = '
        "96\nmemory_bandwidth_gbps = 2400\n"
        "price_per_hour = 1.25\n[node]\ndevices = 4\nbandwidth_gbps = 200\n"
        "[network]\nbandwidth_gbps_per_device = 100\nlatency_us = 10\n",
    )
    cluster = Cluster.parse(path)
    assert (cluster.name, cluster.device.name, cluster.num_devices, cluster.num_nodes) == (
        path,
        "h100",
        32,
        8,
    )
    assert cluster.device.peak_flops("bf16") == pytest.approx(494.5e12)
    assert cluster.device.peak_flops("float32") == pytest.approx(
        33.5e12
    )  # keeps the preset's ratio
    plain = Cluster.parse("h100").device.matmul_efficiency
    assert cluster.device.matmul_efficiency == plain  # the same part of another peak
    assert cluster.device.memory_bytes == 96 * 2**30
    assert cluster.device.memory_bandwidth == 2.4e12
    assert cluster.price_per_hour == pytest.approx(40)
    assert cluster.node.bandwidth == 200e9
    assert cluster.network.bandwidth == 12.5e9
    assert cluster.network.latency_seconds == pytest.approx(1e-5)


def test_a_file_without_a_preset(tmp_path: Path) -> None:
    text = (
        "[device]\npeak_tflops = {bf16 = 200, float32 = 50}\nmemory_gb = "
        "24\nmemory_bandwidth_gbps = 1000\n"
        "[node]\ndevices = 2\nbandwidth_gbps = 25\n[network]\nbandwidth_gbps_per_device = 10\n"
    )
    cluster = Cluster.parse(write(tmp_path, text))
    assert (cluster.device.name, cluster.num_devices, cluster.device.price_per_hour) == (
        "machines",
        2,
        0,
    )
    assert (cluster.device.peak_flops("bf16"), cluster.device.peak_flops("float32")) == (
        200e12,
        50e12,
    )
    with pytest.raises(
        ClusterError, match="no peak is known for precision float64, only for bf16, float32"
    ):
        cluster.device.peak_flops("float64")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[device]\npreset = 'h10'", "[device] preset 'h10' is unknown; did you mean 'h100'?"),
        (
            "[device]\npreset = 'h100'\nmemory = 80",
            "unknown key device.memory; did you mean 'device.memory_gb'?",
        ),
        (
            "[devise]\nmemory_gb = 80",
            "unknown key devise.memory_gb; did you mean 'device.memory_gb'?",
        ),
        (
            "[device]\npreset = 'h100'\npeak_tflops = 1e9",
            "device.peak_tflops is 1e+09 TFLOP/s, which cannot be",
        ),
        (
            "[device]\npreset = 'h100'\npeak_tflops = 0",
            "device.peak_tflops is 0 TFLOP/s, which cannot be",
        ),
        (
            "[device]\npreset = 'h100'\npeak_tflops = {bf16 = -1}",
            "device.peak_tflops.bf16 is -1 TFLOP/s, which cannot be",
        ),
        (
            "[device]\npreset = 'h100'\npeak_tflops = {fp4 = 1}",
            "device.peak_tflops is one number, or a table with bf16",
        ),
        (
            "[device]\npreset = 'h100'\nmemory_gb = -80",
            "device.memory_gb is -80 GB, which cannot be",
        ),
        (
            "[device]\npreset = 'h100'\nmemory_gb = nan",
            "device.memory_gb is nan GB, which cannot be",
        ),
        (
            "[device]\npreset = 'h100'\nmemory_gb = '80'",
            "device.memory_gb must be a number of GB, not '80'",
        ),
        (
            "[device]\npreset = 'h100'\nmemory_gb = true",
            "device.memory_gb must be a number of GB, not True",
        ),
        ("[device]\npreset = 'h100'\nprice_per_hour = -1", "device.price_per_hour is -1 dollars"),
        (
            "[device]\npreset = 'h100'\n[node]\ndevices = 2.5",
            "node.devices must be a whole number of devices, not 2.5",
        ),
        ("[device]\npreset = 'h100'\n[node]\nbandwidth_gbps = 0", "node.bandwidth_gbps is 0 GB/s"),
        (
            "[device]\npreset = 'h100'\n[network]\nlatency_us = 0",
            "network.latency_us is 0 microseconds",
        ),
        ("count = 0\n[device]\npreset = 'h100'", "count is 0 devices"),
        ("[device\n", "this is not valid TOML: "),
        ("[device\n", "line 1"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert message in refused(path)
    assert refused(path).startswith(path)


def test_all_wrong_numbers_at_once(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "[device]\npeak_tflops = 0\n[node]\ndevices = 8\n"))
    assert [line.strip().split(" ")[0] for line in message.splitlines()[1:]] == [
        "device.peak_tflops",
        "device.memory_gb",
        "device.memory_bandwidth_gbps",
        "node.bandwidth_gbps",
        "network.bandwidth_gbps_per_device",
    ]
    assert (
        "device.memory_gb is missing; give it in GB, or name a [device] preset to start from"
        in message
    )


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    assert "this is a directory, not a TOML file" in refused(f"{tmp_path}/")


def test_what_to_write_for_more_devices_is_what_the_cluster_was_read_from(tmp_path: Path) -> None:
    """A file is not asked for by the name of its preset, nor by its own name with a count."""
    assert Cluster.parse("h100x8").how_to_have(16) == "ask for h100x16"
    file = tmp_path / "ours.toml"
    file.write_text('count = 1\n[device]\npreset = "h100"\n')
    found = Cluster.parse(str(file))
    assert found.how_to_have(2) == f"write count = 2 in {file}"
    file.write_text(file.read_text().replace("count = 1", "count = 2"))
    assert Cluster.parse(str(file)).num_devices == 2
