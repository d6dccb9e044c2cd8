"""The machines that people rent, by name: the tables of `presets.toml` as records.

The file has one table a device, with the unit and the source of every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from plait.errors import ClusterError
from plait.toml import read_toml

NVLINK_LATENCY_US: Final = 3.33  # DeepSeek-V3 (arXiv 2505.09343), table 5: 64 bytes end to end
NETWORK_LATENCY_US: Final = 3.7  # the same table: InfiniBand across leaves
NODE_LATENCIES_US: Final[Mapping[str, float]] = MappingProxyType(
    {
        "nvlink": NVLINK_LATENCY_US,
        "pcie": 5.0,  # through the host; an order of magnitude, no source
        "torus": 1.0,  # between neighbours of a TPU pod; an order of magnitude, no source
    }
)


@dataclass(frozen=True)
class Preset:
    """One device in its usual node.

    Rates are dense TFLOP/s, memory is in 2^30 bytes, and bandwidths are in GB/s. The network is
    in Gb/s a device, the price in US dollars an hour. `presets.toml` says what each means.
    A number that is not published, or that the device does not have, is 0.
    """

    bf16: float
    float32: float
    float64: float
    memory_gb: float
    memory_bandwidth: float
    node_bandwidth: float
    network: float
    price: float
    float16_only: bool = False
    fp8: float = 0.0
    microscaled: bool = False
    nvfp4: float = 0.0
    achieved_bf16: float = 0.0
    pair_bandwidth: float = 0.0
    latency: str = "nvlink"
    devices: int = 8
    watts: float = 0.0

    @property
    def peaks(self) -> dict[str, float]:
        """The dense TFLOP/s by precision, without those that the device does not have."""
        rates = {"bf16": self.bf16, "float32": self.float32, "float64": self.float64}
        narrow = {
            "fp8": self.fp8,
            "mxfp8": self.fp8 if self.microscaled else 0.0,
            "nvfp4": self.nvfp4,
        }
        return {**rates, **{name: rate for name, rate in narrow.items() if rate}}

    @property
    def node_latency_us(self) -> float:
        """Microseconds of the links inside a node."""
        return NODE_LATENCIES_US[self.latency]


def _read() -> dict[str, Preset]:
    tables: Mapping[str, Any] = read_toml(Path(__file__).with_name("presets.toml"), ClusterError)
    return {name: Preset(**table) for name, table in tables.items()}


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(_read())
"""The presets by name, in the order in which lists show them."""
