"""The clusters of published runs: presets, and what differs from them, each with where that is
said.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planner.rows import Case
from plait.cluster import Cluster
from plait.predict.cost.machines import machine_of
from plait.predict.cost.time.machine import Efficiency, Machine

GIB = 2.0**30
EFA_LATENCY = 20e-6
"""Seconds of the smallest message between two nodes through EFA: the constant of its own tuner
(aws-ofi-nccl, `nccl_ofi_tuner_model.c`, p5).
"""
NETWORKS = {
    "EFA": {"latency_seconds": EFA_LATENCY, "congestion": 0.02, "step_seconds": 11e-6},
    "EFA of 09d": {"latency_seconds": EFA_LATENCY, "congestion": 0.85, "step_seconds": 40e-6},
}
"""What collectives over 2 to 64 nodes say of two networks. The first is of 2025: gathers of 32 MiB
to 2 GiB. The other is that of the authors of 09d and 09e, who print the bandwidth of gathers and
scatters of 256 MiB (`pp_comm_bandwidth.html` of their playbook).
"""


def machine_for(case: Case, efficiency: Efficiency | None = None) -> Machine:
    """The machine that a run was made on."""
    cluster = Cluster.parse({"h100-96gb": "h100", "gh200": "h100"}.get(case.device, case.device))
    device = cluster.device
    node = cluster.node
    network = cluster.network
    chosen = efficiency or Efficiency()
    if case.num_devices > 1 and case.row["gpus_per_node"]:
        node = replace(node, devices=int(case.row["gpus_per_node"]))
    if case.device == "h100-96gb":
        # HBM2e and 500 W of 700 W (the table's hardware list); dynamic power goes with the cube of
        # the clock.
        flops = {
            precision: rate * (500 / 700) ** (1 / 3) for precision, rate in device.flops.items()
        }
        device = replace(device, flops=flops, memory_bandwidth=2.4e12, memory_bytes=96 * GIB)
    if case.device == "gh200":
        # Four superchips a node, 150 GB/s to each neighbour; Slingshot-11, 200 Gb/s a port.
        # float32 on TF32 units: the published steps are shorter than their flops at 67 TFLOP/s.
        flops = {**device.flops, "float32": 494e12}
        device = replace(device, flops=flops, memory_bandwidth=4.0e12, memory_bytes=96 * GIB)
        node = replace(node, bandwidth=150e9, pair_bandwidth=150e9)
        network = replace(network, bandwidth=25e9)
    if case.source == "12d":
        network = replace(
            network, bandwidth=12.5e9 / 8
        )  # one 100 Gb/s port for the eight devices of a node
    if case.source == "09g":
        network = replace(
            network, bandwidth=6.25e9
        )  # four 100 Gb/s Omni-Path ports for eight devices
    if case.source == "09i":
        network = replace(network, bandwidth=6.25e9)  # four 100 Gb/s RoCE ports for eight devices
    if case.source in {"09d", "09e"}:
        network = replace(network, **NETWORKS["EFA of 09d"])
    return machine_of(Cluster(cluster.name, device, node, network, case.num_devices), chosen)


def preset_machine(case: Case, efficiency: Efficiency | None = None) -> Machine:
    """The preset alone, as a user would name it."""
    name = {"h100-96gb": "h100"}.get(case.device, case.device)
    return machine_of(Cluster.parse(f"{name}x{case.num_devices}"), efficiency)
