"""`plait verify --step` on other people's frameworks, the real packages, right and wrong.

New ranks are started for each: these libraries keep the world that they have met first.
"""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.verify import Report
from plait.verify.outside.source import parse
from plait.verify.outside.task import Trial
from plait.verify.outside.trial import check
from tests.parity.test_outside import FOLDER

pytestmark = pytest.mark.slow


def report_of_new_ranks(package: str, text: str, dtype: str = "float64") -> Report:
    pytest.importorskip(package)
    return check(Trial(parse(str(FOLDER / text)), dtype=dtype), 2)


@pytest.mark.parametrize("name", ["fabric_ddp", "fabric_fsdp2", "fabric_tensor"])
def test_a_step_of_lightning_fabric_is_equal(name: str) -> None:
    report = report_of_new_ranks("lightning", f"{name}.py")
    assert report.ok, report.text()
    assert report.error("grad") < 1e-13 and report.num_steps == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fabric_ddp.py:never_synchronized", "the gradient lacks data rank 1"),
        ("fabric_fsdp2.py:never_synchronized", "clipping saw no gradients"),
        ("fabric_tensor.py:other_samples", "first output that differs is that of 'blocks.0'"),
    ],
)
def test_a_wrong_step_of_lightning_fabric_is_named(text: str, words: str) -> None:
    report = report_of_new_ranks("lightning", text)
    assert not report.ok
    assert words in report.text()


@pytest.mark.parametrize(
    "name",
    [*(f"deepspeed_zero{stage}" for stage in (0, 2, 3)), "deepspeed_zero", "deepspeed_pipeline"],
)
def test_a_step_of_deepspeed_is_equal(name: str) -> None:
    report = report_of_new_ranks("deepspeed", f"{name}.py", "float32")
    assert report.ok, report.text()
    assert report.error("grad") < 1e-5 and report.num_steps == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deepspeed_zero2.py:scaled_once_more", "4.0000 times too small: the number of data ranks"),
        ("deepspeed_zero3.py:scaled_once_more", "4.0000 times too small: the number of data ranks"),
        ("deepspeed_pipeline.py:added_up", "every gradient is 2.0000 times too large"),
        ("deepspeed_pipeline_clipped.py", "the norm of rank 0's parameters alone; that of all is"),
    ],
)
def test_a_wrong_step_of_deepspeed_is_named(text: str, words: str) -> None:
    report = report_of_new_ranks("deepspeed", text, "float32")
    assert not report.ok
    assert words in report.text()


def test_masters_of_less_precision_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="judge it with --dtype float32"):
        report_of_new_ranks("deepspeed", "deepspeed_zero.py")
