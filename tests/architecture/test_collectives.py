"""Collectives are called in comm/, groups are made in mesh/groups.py, nowhere else: what is not
counted is not predicted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, each_room, nodes, tree

COLLECTIVES = {
    *(
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "broadcast",
        "broadcast_object_list",
        "barrier",
        "monitored_barrier",
    ),
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_coalesced",
        "gather",
        "gather_object",
    ),
    *(
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "all_to_all",
        "all_to_all_single",
    ),
    *(
        "send",
        "recv",
        "isend",
        "irecv",
        "send_object_list",
        "recv_object_list",
        "P2POp",
        "batch_isend_irecv",
    ),
}
GROUPS = {
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "init_device_mesh",
}


def used(syntax: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of torch.distributed that a module uses, as (name, line), by whatever alias."""
    aliases = {"torch.distributed"}
    for node in nodes(syntax):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("torch.distributed"):
                yield from ((a.name, node.lineno) for a in node.names)
                aliases |= {a.asname or a.name for a in node.names}
            elif node.module == "torch":
                aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for node in nodes(syntax):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            yield node.attr, node.lineno


@each_room
def test_collectives_are_called_in_comm_and_groups_made_in_mesh(path: Path) -> None:
    where = path.relative_to(PACKAGE)
    for name, line in used(tree(path)):
        if name in COLLECTIVES:
            assert where.parts[0] == "comm", f"{where}:{line}: calls {name} outside comm/"
        if name in GROUPS:
            assert str(where) == "mesh/groups.py", (
                f"{where}:{line}: calls {name} outside mesh/groups.py"
            )


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(t)",
        "import torch\ntorch.distributed.all_reduce(t)",
        "from torch import distributed as d\nd.all_reduce(t)",
        "from torch.distributed import all_reduce",
        "import torch.distributed._functional_collectives as c\nc.all_reduce(t)",
    ],
)
def test_the_search_finds_every_way_to_call(text: str) -> None:
    assert "all_reduce" in [name for name, _ in used(ast.parse(text))]
