"""Where ranks cannot read each other's memory, all of them agree on Gloo; who insists on shared
memory is told why not.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from plait.comm.backends.gloo import Gloo
from plait.comm.shm import processes
from plait.errors import PlanError
from plait.mesh import Mesh


def _on_two_hosts(world, insist):
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    own = processes.Identity.own
    processes.Identity.own = staticmethod(
        lambda: dataclasses.replace(own(), host=f"host{world.rank // 2}")
    )
    try:
        if insist:
            with pytest.raises(PlanError, match="cannot read each other's memory"):
                world.axis("world")
            return None
        kinds = {}
        for name in ("tp", "dp", "world"):
            axis = world.axis(name)
            total = torch.tensor([float(world.rank)])
            axis.all_reduce(total).wait()
            assert total.item() == sum(axis.ranks)
            kinds[name] = isinstance(axis._backend, Gloo)
        return kinds
    finally:
        processes.Identity.own = own


def test_axes_between_hosts_use_gloo_and_axes_inside_use_memory(ranks):
    mesh = Mesh(dp=2, tp=2)
    assert (
        ranks(4, _on_two_hosts, False, plan=mesh) == [{"tp": False, "dp": True, "world": True}] * 4
    )
    ranks(4, _on_two_hosts, True, plan=mesh, backend="shared")


SCRIPT = """
import sys
import torch, torch.distributed as dist
from plait.comm import init
from plait.mesh import Mesh
store = dist.FileStore(sys.argv[2], 2)
world = init(Mesh(dp=2), rank=int(sys.argv[1]), store=store, backend=sys.argv[3], device="cpu")
tensor = torch.ones(3)
world.axis("dp").all_reduce(tensor).wait()
world.close()
world.close()
print(tensor.tolist())
"""


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_a_closed_world_lets_its_processes_end(tmp_path, backend):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), backend],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in both:
        assert process.communicate(timeout=40)[0] == "[2.0, 2.0, 2.0]\n"
        assert process.returncode == 0
