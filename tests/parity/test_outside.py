"""`plait verify --step` on training steps of torch's own frameworks, right ones and wrong ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.verify import Report
from plait.verify.outside.source import FunctionSource, parse
from plait.verify.outside.task import Trial
from plait.verify.outside.trial import check, on_ranks

FOLDER = Path(__file__).parent / "outside"


def _check(world: Any, source: FunctionSource) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_ranks(world, Trial(source))


def report_of(ranks: Any, text: str) -> Report:
    reports = ranks(2, _check, parse(str(FOLDER / text)))
    assert reports[0].text() == reports[1].text()
    return reports[0]


def test_gradients_of_a_closure_are_those_after_it(ranks) -> None:
    report = ranks(1, _check, parse(str(FOLDER / "closure.py")))[0]
    assert report.ok, report.text()
    assert report.error("grad") < 1e-13


@pytest.mark.parametrize(
    "name", ["ddp", "frozen", "fsdp2", "tensor", "pipelining", "modules", "own_engine"]
)
def test_a_right_step_is_equal(ranks, name: str) -> None:
    report = report_of(ranks, f"{name}.py")
    assert report.ok, report.text()
    assert bool(report.notes) == (name == "tensor")
    assert report.error("grad") < 1e-13 and report.num_steps == 3
    assert report.plan == f"{name}.py:train_step"


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        ("ddp.py:beside_the_wrapper", "dropped", "lacks data rank 1"),
        ("ddp.py:equal_data", "data-split", "no rank computed on sample 4, 5, 6, 7"),
        ("ddp.py:clipped_before_the_mean", "", ""),
        ("fsdp2.py:made_too_early", "stale-parameters", "made before the model was wrapped"),
        ("tensor.py:data_parallel_too", "", ""),
        ("pipelining.py:accumulated", "", "times too"),
        (
            "own_engine.py:half_of_the_samples",
            "data-split",
            "no rank computed on sample 2, 3, 6, 7",
        ),
        ("own_reference.py", "", "2.0000 times too large"),
    ],
)
def test_a_wrong_step_is_not(ranks, text: str, cause: str, words: str) -> None:
    report = report_of(ranks, text)
    assert not report.ok
    causes = {finding.cause for finding in report.findings}
    assert not cause or cause in causes, report.text()
    assert words in report.text()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wrong_output", "first output that differs is that of 'blocks.1.down', on rank 1 in"),
        (
            "wrong_backward",
            "gradient of an output that differs is that of 'blocks.1.up', on rank",
        ),
    ],
)
def test_the_first_wrong_module_is_named(ranks, function: str, words: str) -> None:
    report = report_of(ranks, f"modules.py:{function}")
    assert not report.ok
    assert words in report.text()
    assert [one.name for one in report.modules][:2] == ["blocks.0.norm", "blocks.0.up"]


def test_a_missing_reduction_leaves_all_modules_right(ranks) -> None:
    report = report_of(ranks, "ddp.py:beside_the_wrapper")
    assert "modules-right" in {finding.cause for finding in report.findings}


def test_a_loss_of_each_ranks_own_part_is_not_compared(ranks) -> None:
    report = report_of(ranks, "ddp.py:local_loss")
    assert report.ok, report.text()
    assert "the loss was not compared" in report.notes[0]
    assert "  loss        not compared\n" in report.text()
    assert report.as_dict()["loss_error"] == 0.0


@pytest.mark.parametrize("text", ["lists.py", "lists.py:train", "texts.py", "texts.py:train"])
def test_samples_in_lists_are_counted_and_found(ranks, text: str) -> None:
    report = report_of(ranks, text)
    assert report.ok, report.text()
    assert report.error("grad") < 1e-13 and report.num_steps == 3
    assert not any("every rank computed on" in note for note in report.notes)


def test_samples_in_lists_that_no_rank_saw_are_named(ranks) -> None:
    report = report_of(ranks, "lists.py:equal_data")
    assert "no rank computed on sample 1, 3, 5, 7 of" in report.text()


def test_a_step_without_an_update_is_refused(ranks) -> None:
    with pytest.raises(AssertionError, match="no torch optimizer made an update in step 0"):
        report_of(ranks, "ddp.py:no_update")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}/none.py", "there is no file"),
        ("{}/empty.py", "defines no make"),
        ("{}/half.py", "defines no train_step"),
        ("{}/half.py:trian_step", "defines no trian_step"),
        ("{}/half.py:", "a function's name is missing"),
        ("{}/bad.py", "bad.py:1"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_any_rank(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "half.py").write_text("def make():\n    pass\n")
    (tmp_path / "bad.py").write_text("def make(:\n")
    with pytest.raises(ConfigError, match=words):
        parse(text.format(tmp_path))


@pytest.mark.slow
def test_a_make_that_returns_something_else_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "steps.py"
    path.write_text("def make():\n    return 1\ndef train_step(model, batch, loss):\n    pass\n")
    with pytest.raises(ConfigError, match=r"returns \(model, batches, loss\)"):
        check(Trial(parse(str(path))), 1)


def report_of_new_ranks(text: str) -> Report:
    """Hugging Face's libraries keep the world that they have met first."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return check(Trial(parse(str(FOLDER / text))), 2)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["accelerate_steps.py", "trainer_loop.py"])
def test_a_step_of_hugging_face_is_equal(text: str) -> None:
    report = report_of_new_ranks(text)
    assert report.ok, report.text()
    assert report.error("grad") < 1e-4 and report.num_steps == 2
    assert not any("every rank computed on" in note for note in report.notes)


@pytest.mark.slow
def test_an_unwrapped_model_of_accelerate_is_caught() -> None:
    report = report_of_new_ranks("accelerate_steps.py:unwrapped")
    assert not report.ok
    assert "missing-reduction" in {finding.cause for finding in report.findings}, report.text()


@pytest.mark.parametrize(
    "text",
    [
        "batch_norm.py",
        "batch_norm.py:in_micro_batches",
        "batch_norm.py:evaluated_between",
        "batch_norm_exchanged.py",
    ],
)
def test_statistics_of_a_batch_norm_are_those_of_its_slices(ranks, text: str) -> None:
    report = report_of(ranks, text)
    assert report.ok, report.text()
    assert any(one.kind == "buffer" for one in report.differences)


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        ("batch_norm.py:seen_twice", "buffers", "1.running_mean"),
        ("batch_norm.py:not_kept", "buffers", "1.running_var"),
        ("batch_norm.py:beside_the_wrapper", "dropped", "lacks data rank 1"),
    ],
)
def test_a_batch_norm_that_is_wrong_is_named(ranks, text: str, cause: str, words: str) -> None:
    report = report_of(ranks, text)
    assert cause in {finding.cause for finding in report.findings}, report.text()
    assert words in report.text()
