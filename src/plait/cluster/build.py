"""From quoted numbers to hardware: vendors' units into SI, after every number was looked at.

Presets and cluster files meet here as one table of settings. So a file overrides any number of a
preset, and the same bounds guard both. The bounds only catch slips (a unit, a sign, a zero too
many), not unusual machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from plait.cluster.bounds import MOST_DEVICES, Bounds, number_faults
from plait.cluster.calibration import CALIBRATION_BOUNDS, calibration_of
from plait.cluster.hardware import Device, Hardware, Network, Node
from plait.cluster.presets import (
    NETWORK_LATENCY_US,
    NVLINK_LATENCY_US,
    PRESETS,
)
from plait.errors import ClusterError
from plait.values import JsonMapping, JsonObject

GIB: Final = 2.0**30  # device memory is sold in GB and made in GiB
GIGABYTE: Final = 1e9
GIGABIT: Final = 1e9 / 8
MICROSECOND: Final = 1e-6


BOUNDS: Final[dict[str, Bounds]] = {
    "count": Bounds(1, MOST_DEVICES, "devices", whole=True),
    "device.peak_tflops": Bounds(1e-7, 1e5, "TFLOP/s"),
    "device.memory_gb": Bounds(1e-2, 1e5, "GB"),
    "device.memory_bandwidth_gbps": Bounds(1e-1, 1e6, "GB/s"),
    "device.price_per_hour": Bounds(0, 1e4, "dollars"),
    "node.devices": Bounds(1, 100_000, "devices", whole=True),
    "node.bandwidth_gbps": Bounds(1e-2, 1e5, "GB/s"),
    "node.latency_us": Bounds(1e-3, 1e6, "microseconds"),
    "network.bandwidth_gbps_per_device": Bounds(1e-3, 1e5, "Gb/s"),
    "network.latency_us": Bounds(1e-3, 1e6, "microseconds"),
    "node.pair_bandwidth_gbps": Bounds(0, 1e5, "GB/s"),
    "network.congestion": Bounds(0, 100, "of the bandwidth for each doubling of the nodes"),
    "network.step_us": Bounds(0, 1e6, "microseconds"),
    "device.power_watts": Bounds(0, 1e5, "watts"),
    **CALIBRATION_BOUNDS,
}
OPTIONAL: Final = frozenset(
    {
        "count",
        "node.pair_bandwidth_gbps",
        "network.congestion",
        "network.step_us",
        "device.power_watts",
        *CALIBRATION_BOUNDS,
    }
)
"""Settings that may be left out: one node, and what the planner takes in general."""


def settings_of(name: str) -> JsonObject:
    """A preset as the settings of a cluster file, by dotted key."""
    preset = PRESETS[name]
    pair = {"node.pair_bandwidth_gbps": preset.pair_bandwidth} if preset.pair_bandwidth else {}
    power = {"device.power_watts": preset.watts} if preset.watts else {}
    return {
        **pair,
        **power,
        "device.peak_tflops": preset.peaks,
        "device.memory_gb": preset.memory_gb,
        "device.memory_bandwidth_gbps": preset.memory_bandwidth,
        "device.price_per_hour": preset.price,
        "node.devices": preset.devices,
        "node.bandwidth_gbps": preset.node_bandwidth,
        "node.latency_us": preset.node_latency_us,
        "network.bandwidth_gbps_per_device": preset.network,
        "network.latency_us": NETWORK_LATENCY_US,
    }


DEFAULTS: Final[JsonObject] = {
    "device.price_per_hour": 0.0,
    "node.latency_us": NVLINK_LATENCY_US,
    "network.latency_us": NETWORK_LATENCY_US,
}
"""Settings that a file without a preset may leave out."""


def faults(settings: JsonMapping) -> list[str]:
    """One message for each number that is missing, no number, or out of bounds."""
    messages: list[str] = []
    for key, bounds in BOUNDS.items():
        if key in OPTIONAL and key not in settings:
            continue
        if key not in settings:
            messages.append(
                f"{key} is missing; give it in {bounds.unit}, or name a [device] preset to start "
                "from"
            )
        elif key == "device.peak_tflops" and isinstance(settings[key], Mapping):
            messages += [
                fault
                for name, number in settings[key].items()
                for fault in number_faults(f"{key}.{name}", number, bounds)
            ]
        else:
            messages += number_faults(key, settings[key], bounds)
    return messages


def build(name: str, device: str, settings: JsonMapping, achieved: float = 0.0) -> Hardware:
    """The hardware of complete settings, in SI units. `achieved` is the part of the bf16 peak that
    the best measured product has, 0 where none was measured.

    Raises `ClusterError` listing every wrong number.
    """
    wrong = faults(settings)
    if wrong:
        raise ClusterError(
            f"{name}: {wrong[0]}" if len(wrong) == 1 else "\n  ".join([f"{name}:", *wrong])
        )
    tflops = settings["device.peak_tflops"]
    devices = settings["node.devices"]
    return Hardware(
        name=name,
        device=Device(
            name=device,
            flops={precision: peak * 1e12 for precision, peak in tflops.items()},
            memory_bytes=settings["device.memory_gb"] * GIB,
            memory_bandwidth=settings["device.memory_bandwidth_gbps"] * GIGABYTE,
            price_per_hour=float(settings["device.price_per_hour"]),
            matmul_efficiency=achieved or None,
            power_watts=float(settings.get("device.power_watts", 0.0)),
        ),
        node=Node(
            devices,
            settings["node.bandwidth_gbps"] * GIGABYTE,
            settings["node.latency_us"] * MICROSECOND,
            settings.get("node.pair_bandwidth_gbps", 0.0) * GIGABYTE,
        ),
        network=Network(
            settings["network.bandwidth_gbps_per_device"] * GIGABIT,
            settings["network.latency_us"] * MICROSECOND,
            settings.get("network.congestion"),
            settings.get("network.step_us", 0.0) * MICROSECOND,
        ),
        num_devices=settings.get("count", devices),
        calibration=calibration_of(settings),
    )
