"""A sample of the census: classes without a table of roles equal one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.census import table
from benchmarks.census.cell import judge
from benchmarks.census.configs import classes, tiny

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("family", "task", "plan"),
    [
        ("deepseek_v3", "causal", "tp2"),  # latent attention, experts
        ("phi3", "causal", "tp2"),  # packed projections of unequal parts
        ("bloom", "causal", "tp2"),  # ALiBi, numbers of heads in the code
        ("t5", "seq2seq", "tp2"),  # relative positions that layers share
        ("mixtral", "causal", "tp4:2d"),  # a router of all tokens
        ("cohere", "causal", "tp8:3d"),  # norms that know no parts of features
        ("nemotron", "causal", "tp4:2d"),  # norms that add one to their weight
        ("vit", "image", "cp2:ring"),  # patches and a class token, which two ranks do not divide
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_class_equals_one_device(family: str, task: str, plan: str) -> None:
    cell = judge(task, tiny(task, family), plan)
    assert cell.verdict == "equal", cell.reason


@pytest.mark.filterwarnings("ignore")
def test_a_backward_of_a_models_own_is_refused_under_cp_by_its_block() -> None:
    cell = judge("masked", tiny("masked", "reformer"), "cp2:ring")
    assert cell.verdict == "refused"
    assert "is called without autograd although" in cell.reason


def test_every_class_is_counted_once_under_its_namesake() -> None:
    found = classes()
    assert len(found) == len(set(found)) > 150
    assert {("causal", "llama"), ("seq2seq", "t5"), ("masked", "bert"), ("image", "vit")} <= set(
        found
    )


@pytest.mark.parametrize(
    ("reason", "written"),
    [
        ("no loop in /srv/me/.venv/lib/models/a_b.py:12 runs", "no loop in a_b.py:N runs"),
        ("File '/opt/x-1/y/z.py', line 3", "File '...', line N"),
        (
            "https://pytorch.org/docs/a tells q/k of 1/2",
            "https://pytorch.org/docs/a tells q/k of N/N",
        ),
    ],
)
def test_reasons_in_the_page_name_no_folder_of_a_machine(
    reason: str, written: str, tmp_path: Path
) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before {table.BEGIN} old {table.END} after")
    cell = {"task": "causal", "family": "gpt", "plan": "tp2", "verdict": "crashed", "seconds": 1.0}
    table.write(page, [cell | {"reason": reason}])
    text = page.read_text()
    assert f"- crashed: {written} (`tp2`: gpt)" in text
    assert text.startswith("before ") and text.endswith(" after") and " old " not in text
