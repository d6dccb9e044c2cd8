"""From a cluster to the machine of an estimate: an accelerator, or a processor with its profile."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from plait.cluster import Cluster, CpuProfile, Device
from plait.cluster.calibration import Calibration
from plait.predict.cost.memory.rules import (
    PROCESS_BYTES_CPU,
    DeviceMemory,
    MemoryRules,
    ProcessMemory,
)
from plait.predict.cost.time.accelerator import Accelerator
from plait.predict.cost.time.machine import Efficiency, Machine
from plait.predict.cost.time.processor import Processor
from plait.values import JsonObject

SUSTAINED = {
    "a100-40gb": 0.815, "a100-80gb": 0.815, "h100": 0.673, "h200": 0.659, "b200": 0.582,
    "gb200": 0.565, "gb300": 0.565, "l40s": 0.501, "t4": 0.37, "a800": 0.815, "h800": 0.673,
}  # fmt: skip
"""Rate of long bf16 products over the peak, with the clocks that a device under load has. From the
public kernel measurements of ai-dynamo/aiconfigurator (gemm_perf, commit 095f58a). GB300: none,
taken as GB200; A800 and H800 as A100 and H100. T4: 24 of 65 TFLOP/s under its power cap of 70 W
(NVIDIA developer forum, thread 264462).
"""


ROUNDED = {"h100": 0.88, "h200": 0.91, "gh200": 0.93, "b200": 0.98, "b300": 0.95, "gb200": 0.99}
"""Best measured product in eight bits over its peak, against the same part in bf16: 1,403 of 1,979
TFLOP/s over 794.5 of 989 on H100 (stas00/ml-engineering, compute/accelerator, commit 744d01e).
"""
USUAL_ROUNDED = 0.9
"""`ROUNDED` of other devices: the median of those that were measured, rounded down."""

ASYNCHRONOUS = frozenset(
    ("h100", "h100-pcie", "h200", "h800", "h20", "gh200", "b200", "b300", "gb200", "gb300")
)
"""Devices whose matrix units are fed by a thread that does not wait for them."""
ATTENTION = {"tuned": 1.0, "chosen": 1.0, "portable": 0.65, "early": 0.35}
"""Speed of attention kernels on them. FlashAttention-2 has 350 of the 530 TFLOP/s of TensorRT-LLM's
kernels at 16,384 tokens (Shah et al., "FlashAttention-3", figure 5; context_attention_perf of
aiconfigurator). The first has half of that (Dao, "FlashAttention-2", figures 5 and 6). On an H200
torch 2.11 takes cuDNN's by itself, which was measured there (docs/gpu.md).
"""
OLDER_ATTENTION = {"tuned": 0.77, "chosen": 1.02, "portable": 1.02, "early": 0.55}
"""On other devices, where products wait. At 16,384 tokens an A100 has 149 TFLOP/s with
TensorRT-LLM's kernels. With FlashAttention-2 it has 203 forward and 175 backward
(attention_training of NVIDIA/cudnn-frontend, commit 816ea45).
"""
COOL = 0.26
"""Clocks of a device that has been idle, over those under load, less one. Median of H100, H200,
B200, GB200 and L40S (gemm_perf). Those of an A100 do not fall.
"""
STEADY = frozenset({"a100-40gb", "a100-80gb", "a800"})
"""Devices whose clocks do not fall."""
COLLECTIVE_START = {
    **dict.fromkeys(("h100", "h200", "h800", "h20", "h100-pcie", "gh200"), 4.6e-6),
    "l40s": 5.0e-6,
}
"""Start of a collective as measured, where it is not NCCL's own `baseLat` of 8.4 microseconds.
A100, B200 and GB200 have that (two devices, 512 bytes; nccl_perf of aiconfigurator).
"""
USUAL_START = 8.4e-6


PAIR = 0.73
"""Bandwidth of two devices of a node alone, of that which each has when all take part. A100, H100
and H200 have 0.74 to 0.76, B200 0.70 (256 MB, nccl-tests in ai-dynamo/aiconfigurator).
"""
SWITCH_SUMS = frozenset({"h100", "h200", "h800", "h20", "b200", "b300", "gb200", "gb300"})
"""Devices whose node has a switch that adds up (NVLink SHARP, from the third NVSwitch on)."""

MEASURED = Efficiency(
    matmul=0.8,
    matmul_depth=0.0,
    matmul_rows=0.0,
    memory=0.6,
    attention_forward=0.5,
    attention_backward=0.5,
    attention_seconds=20e-6,
    attention_half_length=0.0,
    attention_depth=0.0,
    link=1.0,
    network=1.0,
    collective_seconds=0.0,
    kernel_seconds=20e-6,
    launch_seconds=0.0,
    call_seconds=0.0,
    eager_passes=1.0,
    congestion=0.0,
    overlap=0.0,
    step_seconds=1e-3,
)
"""For rates that were measured on the machine itself, on products of one size and on copies. A
processor core that computes has no second engine that communicates, so nothing overlaps.
"""


def machine_of(cluster: Cluster, efficiency: Efficiency | None = None) -> Machine:
    """The machine of a cluster; `efficiency` replaces how well its devices do.

    A processor without a profile is timed by its measured rates, as an accelerator is.
    """
    device = cluster.device
    profile = cluster.profile
    attention = ATTENTION if device.name in ASYNCHRONOUS else OLDER_ATTENTION
    if device.is_cpu:
        attention = dict.fromkeys(ATTENTION, 1.0)
    numbers: JsonObject = {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "peak_flops": dict(device.flops),
        "memory": _memory(cluster, profile),
        "memory_bandwidth": device.memory_bandwidth,
        "devices_per_node": cluster.node.devices,
        "link_bandwidth": cluster.node.bandwidth,
        "link_latency": cluster.node.latency_seconds,
        "network_bandwidth": cluster.network.bandwidth,
        "network_latency": cluster.network.latency_seconds,
        "network_congestion": cluster.network.congestion,
        "network_step": cluster.network.step_seconds,
        "price_per_hour": device.price_per_hour,
        "power_watts": device.power_watts,
        "sustained": sustained_fraction(device),
        "rounded_sustained": sustained_fraction(device) * ROUNDED.get(device.name, USUAL_ROUNDED),
        "attention": attention,
        "cool": 0.0 if device.is_cpu or device.name in STEADY else COOL,
        "collective_start": COLLECTIVE_START.get(device.name, USUAL_START),
        "pair_bandwidth": cluster.node.pair_bandwidth,
        "pair": 1.0 if device.is_cpu else PAIR,
        "switch_sums": device.name in SWITCH_SUMS,
        "bar_width": cluster.calibration.time_bar if cluster.calibration else 1.0,
        "default_precision": "float32" if device.is_cpu else "bf16",
    }
    if profile is not None:
        measured = replace(
            MEASURED, matmul=1.0, kernel_seconds=0.0, step_seconds=profile.engine["step"]
        )
        if cluster.calibration is not None:
            stretch = profile.engine["stretch"] * cluster.calibration.compute
            profile = replace(profile, engine={**profile.engine, "stretch": stretch})
        return Processor(profile=profile, efficiency=efficiency or measured, **numbers)
    usual = MEASURED if device.is_cpu else Efficiency()
    own = calibrated(usual, cluster.calibration or Calibration())
    return Accelerator(efficiency=efficiency or own, **numbers)


def kept_machine(cluster: Cluster, share: float = 1.0) -> Machine:
    """The machine of a cluster whose models may take a `share` of the room.

    Equal questions get one object: the caches of the cost model compare machines by identity.
    """
    for known, part, machine in _kept:
        if part == share and known == cluster:
            return machine
    machine = machine_of(cluster)
    machine = replace(machine, memory=replace(machine.memory, share=share))
    _kept.append((cluster, share, machine))
    return machine


_kept: deque[tuple[Cluster, float, Machine]] = deque(maxlen=16)


def calibrated(efficiency: Efficiency, factors: Calibration) -> Efficiency:
    """Constants of a calibrated cluster: seconds of computing, communicating and of the host times
    their factors.
    """
    return replace(
        efficiency,
        matmul=efficiency.matmul / factors.compute,
        memory=efficiency.memory / factors.compute,
        attention_forward=efficiency.attention_forward / factors.compute,
        attention_backward=efficiency.attention_backward / factors.compute,
        attention_seconds=efficiency.attention_seconds * factors.compute,
        link=efficiency.link / factors.communication,
        network=efficiency.network / factors.communication,
        launch_seconds=efficiency.launch_seconds * factors.host,
        call_seconds=efficiency.call_seconds * factors.host,
    )


def _memory(cluster: Cluster, profile: CpuProfile | None) -> MemoryRules:
    size = cluster.device.memory_bytes
    if not cluster.device.is_cpu:
        return DeviceMemory(size)
    process = profile.memory_bytes if profile is not None else PROCESS_BYTES_CPU
    return ProcessMemory(size, process, cluster.node.devices)


def sustained_fraction(device: Device) -> float:
    """Part of the peak rate that long runs of large matrix products hold. It is measured, or
    derived from the best single product.
    """
    if device.is_cpu:
        return 1.0
    if device.name in SUSTAINED:
        return SUSTAINED[device.name]
    return 0.88 * device.matmul_efficiency if device.matmul_efficiency else 0.72
