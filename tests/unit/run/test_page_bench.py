"""The page of benchmarks: rows from rounds, its systems, and commits that are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.page.carried import replaced
from benchmarks.page.commits import ROOT, page_for, ratios_of, slower
from benchmarks.page.measure import Group, Taken
from benchmarks.page.page import groups, rows, text
from benchmarks.page.systems import (
    CASES,
    DDP,
    IN_HALVES,
    LINK_CASES,
    LINK_PLANS,
    bytes_of_system,
    cases_of,
    counterpart,
    names,
    parts,
    plan_of,
    start,
)
from benchmarks.sockets.bench import groups_of
from benchmarks.spread import quartile_text

from plait.cluster.products import ProductTable
from plait.launcher import launch

TABLE = ProductTable(frozenset())


def test_ratios_are_taken_round_by_round() -> None:
    names = (DDP, "torch 1F1B", "pp2:1f1b mb4 | sockets")
    taken = Taken(
        {names[0]: [1.0, 2.0, 4.0], names[1]: [2.0, 4.0, 8.0], names[2]: [1.0, 2.0, 4.0]},
        {name: [0.5, 0.5, 0.5] for name in names},
    )
    group = Group("few tokens", "pipeline", 2, names, 1.0)
    _, peer, own = rows(group, [taken, taken])
    assert (peer.ratio, own.ratio) == ((2.0, 2.0, 2.0), (1.0, 1.0, 1.0))
    assert (peer.to_counterpart, own.to_counterpart) == (None, 0.5)
    assert own.processor_seconds == 1.0
    assert "| pp2:1f1b mb4, sockets | 2000.0 | 1.000 [1.000, 1.000] | 0.500 | 1.000 |" in text(
        [own]
    )


def test_quartiles_stand_behind_the_median() -> None:
    assert quartile_text([4.0, 1.0, 3.0, 2.0, 5.0]) == "3.00 [2.00, 4.00]"
    assert quartile_text([1500.0], ",.0f") == "1,500 [1,500, 1,500]"


@pytest.mark.parametrize("size", [2, 4])
def test_every_plan_of_the_page_is_one_of_so_many_ranks(size: int) -> None:
    for case in CASES.values():
        for family in ("data", "tensor", "pipeline"):
            for name in names(family, size, case, TABLE):
                is_own = " | " in name
                assert not is_own or plan_of(name).world_size == size
                assert family != "pipeline" or not is_own or counterpart(name)


def test_every_family_of_the_shaped_link_has_plans_and_peers() -> None:
    """Tensor and pipeline plans run in two bytes too, and what torch has for a family is there."""
    peers = {"data": "torch FSDP2", "context": "torch ring", "experts": "torch FSDP2"}
    peers |= {"tensor": "torch DTensor, sequence parallel", "pipeline": "torch ZBV"}
    assert set(LINK_PLANS) == set(peers)
    for family, peer in peers.items():
        for number, case in enumerate(cases_of(family)):
            (group,) = groups_of(case, family, 1.0)
            assert group.systems[0] == DDP
            assert peer in group.systems or (number and "DTensor" in peer)
            plans = [name.split(" | ") for name in group.systems if " | " in name]
            assert all(plan_of(plan).world_size == 2 for plan, _ in plans)
            halves = [plan for plan, title in plans if title == IN_HALVES.title]
            whole = [plan for plan, title in plans if title == "sockets"]
            assert halves == (whole if family in ("tensor", "pipeline") else [])


@pytest.mark.long
def test_systems_of_long_sequences_and_experts_train_alike() -> None:
    """Torch's own, and plait's from the same values, on two ranks."""
    for family in ("context", "experts"):
        first, *others = launch(losses, family, nproc=2)[0]
        assert others == pytest.approx([first] * len(others), rel=1e-5)


def losses(family: str) -> list[float]:
    """The loss of the second step of each system, over the whole batch."""
    torch.set_num_threads(1)
    (name,) = cases_of(family)
    case = replace(LINK_CASES[name], num_hidden_layers=1, hidden_size=128, seq_len=32)
    (group,) = groups_of(name, family, 1.0)
    found = []
    for system in group.systems:
        step = start(system, case, 2, TABLE)
        step()
        own = step()
        if isinstance(own, float):
            every = torch.tensor([own], dtype=torch.float64)
            dist.all_reduce(every)
            own = float(every) / 2
        found.append(own if isinstance(own, float) else own.loss)
    return found


def test_torch_tensor_parallelism_takes_steps() -> None:
    """With and without a sequence axis, as the shaped link runs it."""
    peers = [
        name for name in groups_of("wide batch", "tensor", 1.0)[0].systems if "DTensor" in name
    ]
    assert len(peers) == 2
    assert launch(took_steps, peers, nproc=2) == [peers, peers]


def took_steps(names: list[str]) -> list[str]:
    """The systems that took two steps."""
    torch.set_num_threads(1)
    case = replace(LINK_CASES["wide batch"], num_hidden_layers=1, hidden_size=128, seq_len=32)
    for name in names:
        step = start(name, case, 2, TABLE)
        step()
        step()
    return names


def test_the_time_of_the_page_is_shared_among_its_groups() -> None:
    made = groups((2, 4), ("data", "tensor"), 80.0, TABLE)
    assert len(made) >= 8
    assert sum(group.limit_seconds for group in made) == pytest.approx(80.0)


def test_systems_that_are_alive_together_fit_the_memory() -> None:
    case = CASES["few tokens"]
    together = parts("data", 4, case, TABLE, 4 * 6 * bytes_of_system(DDP, case, 4))
    assert [len(one) for one in together] == [5, 4, 4, 4, 4, 4]
    assert all(DDP in one for one in together)
    alone = {name for one in together for name in one}
    assert alone == set(names("data", 4, case, TABLE))
    pipelines = parts("pipeline", 4, case, TABLE, 4 * 2 * bytes_of_system(DDP, case, 4))
    assert [one[:2] for one in pipelines[1:]] == [[DDP, "torch 1F1B"], [DDP, "torch ZBV"]]
    assert parts("data", 4, case, TABLE, 1e15) == [names("data", 4, case, TABLE)]


def test_a_processor_has_one_section_in_the_documentation() -> None:
    page = "# Measured\n\n## A\nold\n## B\nkept\n"
    assert replaced(page, "A", "## A\nnew\n") == "# Measured\n\n## A\nnew\n## B\nkept\n"
    assert replaced(page, "C", "## C\nnew\n") == page + "\n## C\nnew\n"


def test_a_ratio_that_grew_by_more_than_a_twentieth_is_found() -> None:
    old = {("c", 2, "a"): [1.0, 1.1, 0.9], ("c", 2, "b"): [1.0], ("c", 2, "gone"): [1.0]}
    new = {("c", 2, "a"): [1.04, 1.04, 9.0], ("c", 2, "b"): [1.06], ("c", 2, "new"): [5.0]}
    assert slower(old, new) == [(("c", 2, "b"), 1.0, 1.06)]
    page = {"rows": [{"case": "c", "size": 2, "system": "a", "ratio": [0.9, 1.0, 1.1]}]}
    assert ratios_of(page) == {("c", 2, "a"): [1.0]}


def test_a_commit_without_what_the_page_imports_runs_its_own_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "src" / "plait"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert page_for(tmp_path) == tmp_path
    assert "ModuleNotFoundError" in capsys.readouterr().out
    assert page_for(ROOT) == ROOT
