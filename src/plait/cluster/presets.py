"""The machines that people rent, as data: one row a preset, with where each number is from.

Tensor-core peaks, memory and links: the accelerator and network tables of stas00/ml-engineering,
the GPU configs of cli99/llm-analysis, zhebrak/llm-cluster-simulator docs/HARDWARE.md. Latencies:
DeepSeek-V3 (ISCA 2025), table 5. float32 and float64: the vendors' data sheets. Prices are rough
public on-demand figures of 2025, only a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NVLINK_LATENCY_US: Final = 3.33  # DeepSeek-V3 (arXiv 2505.09343), table 5: 64 bytes end to end
NETWORK_LATENCY_US: Final = 3.7  # the same table: InfiniBand across leaves
PCIE_LATENCY_US: Final = 5.0  # through the host; an order of magnitude, no source


@dataclass(frozen=True)
class Preset:
    """One device in its usual node, in the units in which vendors quote them.

    `bf16`, `float32`, `float64`: dense TFLOP/s, float32 without TF32, as PyTorch multiplies by
    default. `memory_gb`: as on the box, which is 2^30 bytes. `memory_bandwidth`, `node_bandwidth`:
    GB/s (the latter per direction, of each device when all take part). `pair_bandwidth`: that of two
    alone, 0 where it is the usual one. `network`: Gb/s per device. `achieved_bf16`: TFLOP/s of the
    best measured matrix product (0: none known). `price`: US dollars an hour.
    """

    bf16: float
    float32: float
    float64: float
    memory_gb: float
    memory_bandwidth: float
    node_bandwidth: float
    network: float
    price: float
    achieved_bf16: float = 0.0
    devices: int = 8
    node_latency_us: float = NVLINK_LATENCY_US
    pair_bandwidth: float = 0.0


FP8: Final[dict[str, float]] = {
    "h100": 1979, "h200": 1979, "h800": 1979, "gh200": 1979, "h20": 296, "h100-pcie": 1513,
    "b200": 4500, "b300": 4500, "gb200": 5000, "gb300": 5000, "l40s": 733, "l4": 242,
    "rtx4090": 330.3, "rtx5090": 419, "mi300x": 2610, "mi325x": 2610, "mi355x": 5000,
    "gaudi3": 1835, "trainium2": 1299,
}  # fmt: skip
"""Dense TFLOP/s in eight bits with float32 sums, of devices that have them. stas00/ml-engineering,
compute/accelerator (commit 744d01e); H20, L4, RTX 5090, Gaudi 3, Trainium2: the vendors' pages.
"""
MICROSCALED: Final = frozenset({"b200", "b300", "gb200", "gb300", "rtx5090", "mi355x"})
"""Devices whose units take one scale for 32 numbers, at the rate of `FP8`."""
NVFP4: Final[dict[str, float]] = {
    "b200": 9000, "b300": 13500, "gb200": 10000, "gb300": 15000, "rtx5090": 1676,
}  # fmt: skip
"""Dense TFLOP/s in four bits with a scale for 16 numbers (NVIDIA's data sheets of each)."""
WITHOUT_BF16: Final = frozenset({"v100-16gb", "v100-32gb", "t4"})
"""Devices whose `bf16` is the rate of float16, which they have instead."""
WATTS: Final[dict[str, float]] = {
    "v100-16gb": 300, "v100-32gb": 300, "a100-40gb": 400, "a100-80gb": 400, "a800": 400,
    "h100": 700, "h200": 700, "h800": 700, "h100-pcie": 350, "gh200": 900, "b200": 1000,
    "b300": 1100, "gb200": 1200, "gb300": 1400, "h20": 400, "l40s": 350, "l4": 72, "a10": 150,
    "a6000": 300, "rtx3090": 350, "rtx4090": 450, "rtx5090": 575, "t4": 70, "mi250x": 560,
    "mi300x": 750, "mi325x": 1000, "mi355x": 1400, "gaudi3": 900,
}  # fmt: skip
"""Board power of a device, from the vendors' data sheets. Hosts, network and cooling come on top.
Ascend 910B, Trainium2 and TPUs: none is published.
"""


# ruff: noqa: E501 -- one row a preset reads as the table that it is
# fmt: off
PRESETS: Final[dict[str, Preset]] = {
    # V100 has no bf16: its 125 is the fp16 tensor-core peak. NVLink 2; one EDR port (100 Gb/s) for each device.
    "v100-16gb": Preset(bf16=125, float32=15.7, float64=7.8, memory_gb=16, memory_bandwidth=900, node_bandwidth=150, network=100, price=0.6),
    "v100-32gb": Preset(bf16=125, float32=15.7, float64=7.8, memory_gb=32, memory_bandwidth=900, node_bandwidth=150, network=100, price=0.8),
    # NVLink 3; 8 x 200 Gb/s HDR (DGX A100). float64 on tensor cores.
    "a100-40gb": Preset(bf16=312, float32=19.5, float64=19.5, memory_gb=40, memory_bandwidth=1555, node_bandwidth=300, network=200, price=1.3, achieved_bf16=271.2),
    "a100-80gb": Preset(bf16=312, float32=19.5, float64=19.5, memory_gb=80, memory_bandwidth=2039, node_bandwidth=300, network=200, price=1.8, achieved_bf16=271.2),
    # NVLink 4; 8 x 400 Gb/s NDR (DGX H100). float64 on tensor cores.
    "h100": Preset(bf16=989, float32=67, float64=67, memory_gb=80, memory_bandwidth=3350, node_bandwidth=450, network=400, price=3.0, achieved_bf16=794.5),
    "h200": Preset(bf16=989, float32=67, float64=67, memory_gb=141, memory_bandwidth=4800, node_bandwidth=450, network=400, price=3.8, achieved_bf16=794.5),
    # NVLink 5; 8 x 400 Gb/s.
    "b200": Preset(bf16=2250, float32=75, float64=37, memory_gb=180, memory_bandwidth=8000, node_bandwidth=900, network=400, price=5.0, achieved_bf16=1745),
    # NVLink domains of 72; 400 and 800 Gb/s for each device. GB300: memory from the B300 row; float64 is nearly absent there.
    "gb200": Preset(bf16=2500, float32=80, float64=40, memory_gb=186, memory_bandwidth=8000, node_bandwidth=900, network=400, price=7.0, achieved_bf16=1822, devices=72),
    "gb300": Preset(bf16=2500, float32=80, float64=1.3, memory_gb=288, memory_bandwidth=8000, node_bandwidth=900, network=800, price=8.0, devices=72),
    # Infinity Fabric: 7 links of 64 GB/s; one peer alone is reached with 64.
    "mi300x": Preset(bf16=1307, float32=163.4, float64=163.4, memory_gb=192, memory_bandwidth=5300, node_bandwidth=448, pair_bandwidth=64, network=400, price=2.5, achieved_bf16=668.4),
    # PCIe 4 x16, no NVLink, and eight devices share the bridges of two hosts: bus bandwidth 19 GB/s between two, 1.4 to 2.2 among eight
    # (nccl-tests in ai-dynamo/aiconfigurator, l40s). What leaves the node goes over the same bridges.
    # The 4090's network is what such nodes usually carry, no vendor figure; it has no peer access, and no measurement here.
    "l40s": Preset(bf16=362, float32=91.6, float64=1.4, memory_gb=48, memory_bandwidth=864, node_bandwidth=2.2, pair_bandwidth=23, network=17, price=1.0, achieved_bf16=251, node_latency_us=PCIE_LATENCY_US),
    "rtx4090": Preset(bf16=165.2, float32=82.6, float64=1.29, memory_gb=24, memory_bandwidth=1008, node_bandwidth=31, network=200, price=0.4, node_latency_us=PCIE_LATENCY_US),
    # fp16, as it has no bf16; PCIe 3 x16. Node and network of four of them are those of a g4dn.12xlarge, 50 Gb/s.
    "t4": Preset(bf16=65, float32=8.1, float64=0.25, memory_gb=16, memory_bandwidth=320, node_bandwidth=15.75, network=12.5, price=0.5, devices=4, node_latency_us=PCIE_LATENCY_US),
    # Links of a chip in all directions together: 300, 200, 600 GB/s (Google's system pages). v4 and v5p: cubes of 64, joined by as many optical
    # links; v5e: a pod of 256, then the data centre's network, no vendor figure. float32 is six bf16 passes, float64 an order of magnitude.
    "tpu-v4": Preset(bf16=275, float32=46, float64=1, memory_gb=32, memory_bandwidth=1200, node_bandwidth=300, network=2400, price=3.2, devices=64, node_latency_us=1.0),
    "tpu-v5e": Preset(bf16=197, float32=33, float64=1, memory_gb=16, memory_bandwidth=820, node_bandwidth=200, network=25, price=1.2, devices=256, node_latency_us=1.0),
    "tpu-v5p": Preset(bf16=459, float32=76, float64=1, memory_gb=95, memory_bandwidth=2760, node_bandwidth=600, network=4800, price=4.2, devices=64, node_latency_us=1.0),
    # GB300's memory and links in a node of eight (B300 HGX; best product of ml-engineering's table). float64 is nearly absent.
    "b300": Preset(bf16=2250, float32=75, float64=1.2, memory_gb=288, memory_bandwidth=8000, node_bandwidth=900, network=800, price=6.0, achieved_bf16=1769),
    # Export versions: NVLink at 400 GB/s both ways (DeepSeek-V3, arXiv 2505.09343), float64 at 1 TFLOP/s. H20: NVLink whole, few units.
    "h800": Preset(bf16=989, float32=67, float64=1, memory_gb=80, memory_bandwidth=3350, node_bandwidth=200, network=400, price=2.5),
    "a800": Preset(bf16=312, float32=19.5, float64=19.5, memory_gb=80, memory_bandwidth=2039, node_bandwidth=200, network=200, price=1.6),
    "h20": Preset(bf16=148, float32=44, float64=1, memory_gb=96, memory_bandwidth=4000, node_bandwidth=450, network=400, price=1.5),
    # Four superchips a node, 150 GB/s to each neighbour, Slingshot-11 (the node of source 12a).
    "gh200": Preset(bf16=989, float32=67, float64=67, memory_gb=96, memory_bandwidth=4000, node_bandwidth=150, pair_bandwidth=150, network=200, price=2.5, achieved_bf16=828.6, devices=4),
    # PCIe 5 without bridges: bus bandwidth 32 GB/s between two, 23 among eight, as measured on RTX PRO 6000 (nccl-tests in ai-dynamo/aiconfigurator).
    "h100-pcie": Preset(bf16=756, float32=51, float64=51, memory_gb=80, memory_bandwidth=2000, node_bandwidth=29, pair_bandwidth=40, network=200, price=2.2, node_latency_us=PCIE_LATENCY_US),
    # PCIe 4 x16, links taken as the L40S's. float32 and float64 from the data sheets.
    "l4": Preset(bf16=121, float32=30.3, float64=0.49, memory_gb=24, memory_bandwidth=300, node_bandwidth=2.2, pair_bandwidth=23, network=17, price=0.6, node_latency_us=PCIE_LATENCY_US),
    "a10": Preset(bf16=125, float32=31.2, float64=0.98, memory_gb=24, memory_bandwidth=600, node_bandwidth=2.2, pair_bandwidth=23, network=17, price=0.6, node_latency_us=PCIE_LATENCY_US),
    "a6000": Preset(bf16=154.8, float32=38.7, float64=1.2, memory_gb=48, memory_bandwidth=768, node_bandwidth=2.2, pair_bandwidth=23, network=17, price=0.6, node_latency_us=PCIE_LATENCY_US),
    # bf16 with float32 sums is half of the quoted fp16 rate. Without peer access; links taken as the L40S's.
    "rtx3090": Preset(bf16=71, float32=35.6, float64=0.56, memory_gb=24, memory_bandwidth=936, node_bandwidth=2.2, pair_bandwidth=23, network=17, price=0.25, node_latency_us=PCIE_LATENCY_US),
    "rtx5090": Preset(bf16=209.5, float32=104.8, float64=1.64, memory_gb=32, memory_bandwidth=1792, node_bandwidth=29, pair_bandwidth=40, network=200, price=0.6, node_latency_us=PCIE_LATENCY_US),
    # A package of two dies, four packages a node (Frontier). MI325X and MI355X: as MI300X, with their own links (ml-engineering's tables).
    "mi250x": Preset(bf16=383, float32=47.9, float64=47.9, memory_gb=128, memory_bandwidth=3280, node_bandwidth=350, network=200, price=1.5, devices=4),
    "mi325x": Preset(bf16=1300, float32=163.4, float64=163.4, memory_gb=256, memory_bandwidth=6000, node_bandwidth=448, pair_bandwidth=64, network=400, price=3.0, achieved_bf16=784.9),
    "mi355x": Preset(bf16=2500, float32=157.3, float64=78.6, memory_gb=288, memory_bandwidth=8000, node_bandwidth=535.5, pair_bandwidth=76.5, network=400, price=4.0, achieved_bf16=1565),
    # A full mesh of eight, 392 GB/s both ways; 200 Gb/s for each device. float64: an order of magnitude.
    "ascend910b": Preset(bf16=376, float32=94, float64=1, memory_gb=64, memory_bandwidth=1600, node_bandwidth=196, pair_bandwidth=28, network=200, price=1.5),
    # Sixteen chips on NeuronLink, 1 TB/s both ways; 3.2 Tb/s a node (AWS's Trn2 page). float64: an order of magnitude.
    "trainium2": Preset(bf16=667, float32=181, float64=1, memory_gb=96, memory_bandwidth=2900, node_bandwidth=512, network=200, price=2.0, devices=16),
    # 21 of 24 ports of 200 Gb/s inside the node, three out of it (Intel's white paper). float64: an order of magnitude.
    "gaudi3": Preset(bf16=1835, float32=229, float64=1, memory_gb=128, memory_bandwidth=3700, node_bandwidth=525, pair_bandwidth=75, network=600, price=2.0),
    # 3,584 Gb/s between chips in all directions together (Google's system page); a pod of 256, then the data centre's network.
    "tpu-v6e": Preset(bf16=918, float32=153, float64=1, memory_gb=32, memory_bandwidth=1640, node_bandwidth=448, network=25, price=2.7, devices=256, node_latency_us=1.0),
}
# fmt: on
