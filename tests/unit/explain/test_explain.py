"""What is explained is what ran: bytes are those of the ledgers, numbers those of one device."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli import explain_page
from plait.cli.entry import main
from plait.cli.explore import opening_of, site_of
from plait.explain.case import case_of, squared_error
from plait.explain.explanation import Explanation, explain
from plait.explain.papers import OPERATIONS, sources
from plait.explain.text import WIDTH, after, held, lines
from plait.explain.words import sentence
from plait.parallel.pipeline.actions import COMPUTE
from plait.plan import axes
from plait.plan.facts import SCHEDULES

DATA = ("dp4", "dp4:ring", "dp4:server", "dp4:zero1", "dp4:zero2", "dp4:zero3")
OUT_OF_STEP = ("dp2:local,every3", "dp2:async-server,stale1")
TENSOR = ("tp4:1d", "tp4:1d,sp", "tp4:2d", "tp4:2.5d", "tp8:2.5d,depth2", "tp8:3d", "tp9:2d")
PIPELINES = tuple(
    f"pp2:{name}{',v2' if facts.needs_virtual else ''} mb4" for name, facts in SCHEDULES.items()
)
OTHERS = (
    "ep4",
    "ep8",  # some experts get no token
    "cp2:ring",
    "cp4:ulysses",
    "mb2",
    "remat:full",
    "remat:selective",
    "precision:bf16",
    "precision:float64",
    "dp2:zero3 remat:full",
    "dp4:zero3,replicate2",
    "dp2:zero1,offload",
)
TERMS = (*DATA, *OUT_OF_STEP, *TENSOR, *PIPELINES, *OTHERS)


@cache
def explained(term: str) -> Explanation:
    return explain(term)


@pytest.mark.parametrize("term", TERMS)
def test_what_is_printed_is_what_the_ledger_counted(term: str) -> None:
    explanation = explained(term)
    text = list(lines(explanation))
    assert max(map(len, text)) <= WIDTH
    printed = {
        found[1]: (int(found[2]), int(found[3]))
        for line in text
        if (found := re.fullmatch(r"  (\w+) +(\d+) times +(\d+) bytes", line))
    }
    ledgers: dict[str, tuple[int, int]] = {}
    for recording in explanation.recordings:
        for (_, op), count in recording.ledger.counts.items():
            num, size = ledgers.get(op, (0, 0))
            ledgers[op] = (num + count.num, size + count.bytes)
    record = json.loads(json.dumps(explanation.as_dict()))
    stepped: dict[str, int] = {}
    for step in record["steps"]:
        assert step["formula"] == OPERATIONS[step["operation"]] and step["paper"]
        assert step["ranks"] and step["phase"] in ("before", "forward", "backward", "update")
        assert step["bytes"] == sum(value["bytes"] for value in step["values"])
        if step["axis"]:
            stepped[step["operation"]] = stepped.get(step["operation"], 0) + step["bytes"]
    assert printed == ledgers
    assert stepped == {op: size for op, (_, size) in ledgers.items()}


@pytest.mark.parametrize(
    "term",
    [*DATA, "remat:full", "tp4:2d", "tp8:3d", "pp2:zb-h1 mb4", "cp2:ring", "cp4:ring", "cp8:ring"],
)
def test_the_numbers_are_those_of_one_device(term: str) -> None:
    explanation = explained(term)
    case = case_of(term)
    model = case.make_model()
    total, count = squared_error(model(case.inputs), case.targets)
    whole = total / count
    whole.backward()
    assert explanation.recordings[0].losses[0] == pytest.approx(whole.item())
    updated = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        updated[name] = param.detach() - 0.125 * param.grad
    for recording in explanation.recordings:
        for shard in recording.after:
            expected = updated[f"{shard.name}.weight"].reshape(-1)[shard.index()]
            assert torch.allclose(shard.values, expected, atol=1e-6), (shard.name, shard.box)


@pytest.mark.parametrize("term", ["tp4:1d,sp", "tp8:3d", "dp4:zero3"])
def test_products_are_products(term: str) -> None:
    for step in explained(term).as_dict()["steps"]:
        for value in step["values"] if step["operation"] == "multiply" else ():
            left, right = (torch.tensor(each["values"]) for each in value["operands"])
            assert torch.equal(torch.tensor(value["results"][0]["values"]), left @ right)


def test_summa_takes_q_steps() -> None:
    """Each product of a column adds to the one before: q of them make Y."""
    steps = [step for step in explained("tp9:2d").steps if step.phase == "forward"]
    first = [step for step in steps if step.operation == "multiply"][:3]
    total = sum(step.first.operands[0].values @ step.first.operands[1].values for step in first)
    assert torch.equal(total, first[-1].first.results[0].values)


def test_the_ring_sends_chunks() -> None:
    sent = [step for step in explained("dp4:ring").steps if step.operation == "send"]
    names = [note.operands[0].name for note in sent[0].notes]
    assert names == ["dW2[0:4]", "dW2[4:8]", "dW2[8:12]", "dW2[12:16]"]
    assert [note.peer for note in sent[0].notes] == [1, 2, 3, 0]


def test_a_server_gets_the_gradients_of_its_weights() -> None:
    sent = [step for step in explained("dp4:server").steps if step.operation == "send"]
    to = {(note.operands[0].name, note.peer) for step in sent for note in step.notes}
    assert to == {("dW2", 0), ("dW1", 1)}
    assert not any("ring" in sentence(step) for step in sent)
    ring = [step for step in explained("dp4:ring").steps if step.operation == "send"]
    assert all("ring" in sentence(step) for step in ring)


def test_tokens_beyond_an_experts_capacity_are_dropped() -> None:
    """Each sequence has four tokens and each of four experts takes one; the better score stays."""
    explanation = explained("ep4")
    case = case_of("ep4")
    router = case.make_model().get_parameter("moe.router.weight").detach()
    dropped = 0
    for routed, sequence in zip(explanation.routing, case.inputs, strict=True):
        scores = (sequence @ router.t()).softmax(-1)
        wanted = scores.argmax(-1).tolist()
        best = {}
        for token, expert in enumerate(wanted):
            if expert not in best or scores[token, expert] > scores[best[expert], expert]:
                best[expert] = token
        expected = [expert if best[expert] == t else None for t, expert in enumerate(wanted)]
        assert routed["experts"] == expected and routed["tokens"] == sequence.tolist()
        dropped += expected.count(None)
    text = " ".join(" ".join(lines(explanation)).split())
    assert dropped and text.count("dropped: its expert is full") == dropped
    sent = [step for step in explanation.as_dict()["steps"] if step["operation"] == "all_to_all"]
    kept = 4 * 4 - dropped
    rows = sum(len(value["operands"][0]["values"]) for value in sent[1]["values"])
    assert rows == kept


def test_a_sum_is_not_named_after_an_input_of_equal_values() -> None:
    """SUMMA adds up partial results; one of them has the values of a block of X by chance."""
    sums = [step for step in explained("tp8:2.5d,depth2").steps if step.operation == "reduce"]
    assert sums and not [step for step in sums if step.name.startswith("block of")]


def test_a_pipeline_walks_its_schedule() -> None:
    explanation = explained("pp2:1f1b mb4")
    assert explanation.simulation is not None
    assert explanation.simulation.bubble_fraction == pytest.approx(1 / 5)
    assert explanation.as_dict()["schedule"]["peak_activations"] == [2, 1]


def test_recomputation_runs_the_inside_of_a_block_again() -> None:
    def backward(term: str) -> list[str]:
        steps = explained(term).steps
        return [sentence(step) for step in steps if step.phase == "backward"]

    again = "multiply: X(B1.W1) [1x2] times B1.W1^T [2x2] = Y(B1.W1) [1x2]"
    assert again in backward("remat:full")
    assert again not in backward("remat:selective")


def test_an_option_of_one_rank_is_what_is_explained() -> None:
    assert "recomputation" in explained("remat:full").source.title
    assert "bfloat16" in explained("precision:bf16").source.title
    assert explained("dp2:zero3 remat:full").source.title.startswith("ZeRO-3")


@pytest.mark.parametrize(("term", "number"), [("pp2:dualpipev", 4), ("pp4:1f1b", 4)])
def test_a_schedule_gets_the_micro_batches_that_it_needs(term: str, number: int) -> None:
    assert case_of(term).plan.micro_batches == number
    assert case_of(f"{term} mb8").plan.micro_batches == 8


def test_the_page_shows_what_is_printed() -> None:
    page = Path(__file__).parents[3] / "docs" / "explain.md"
    shown = page.read_text().partition("```text\n")[2].partition("```")[0]
    assert shown.splitlines() == list(lines(explained("dp2:zero3")))


def test_every_word_of_the_grammar_has_its_paper() -> None:
    words = {*axes.DATA_STRATEGIES, *axes.PIPELINE_SCHEDULES, *axes.TENSOR_MODES}
    words |= {f"cp {name}" for name in axes.CONTEXT_STRATEGIES} | {"1d,sp", "ep", "one"}
    words |= {"remat full", "remat selective", "precision bf16", "precision float64"}
    assert words == sources().keys()
    for source in sources().values():
        assert source.paper and source.formula and source.idea


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("dp4:zreo3", "zero3"),
        ("dp2 tp2", "one at a time"),
        ("tp6:2d", "square"),
        ("tp1:3d", "take tp8:3d"),
        ("pp1:gpipe", "take pp2:gpipe"),
        ("cp1:ulysses", "take cp2:ulysses"),
        ("dp1:zero3", "take dp2:zero3"),
        ("dp128", "at most 64"),
        ("dp2 compile", "leave compile out"),
        ("dp2:local,every99", "every4"),
        ("federated", "plait federated"),
        ("fedavg", "plait federated"),
        ("banana", "banana"),
        ("", "dp"),
        ("tp4:4d", "4d"),
        ("dp0", "0"),
        ("pp2:1f1d mb4", "1f1b"),
        ("<script>alert(1)</script>", "<script>"),
    ],
)
def test_bad_terms_are_refused(term: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", term]) == 2
    assert words in capsys.readouterr().err


def test_the_verb_prints_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "dp2"]) == 0
    assert "WHO HOLDS WHAT" in capsys.readouterr().out
    assert main(["explain", "dp2", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["term"] == "dp2" and answer["ranks"] == 2 and answer["steps"]


def test_the_page_of_plans_gets_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    reply = site_of(opening_of("gpt2", None)).answers["/explain.json"]
    found = json.loads(reply({"term": ["ep4"]}).text)
    record = json.loads(json.dumps(explained("ep4").as_dict()))
    assert {key: found[key] for key in record if key != "steps"} == {
        key: value for key, value in record.items() if key != "steps"
    }
    assert [step["bytes"] for step in found["steps"]] == [one["bytes"] for one in record["steps"]]
    assert all(step["sentence"] for step in found["steps"])
    wrong = reply({"term": ["dp2 tp2"]})
    assert wrong.status == 400 and "one at a time" in json.loads(wrong.text)["error"]


@pytest.mark.parametrize("term", TERMS)
def test_the_page_has_the_steps_that_the_ledger_counted(term: str) -> None:
    text = explain_page.html(explained(term))
    data = json.loads(text.partition('id="drawn">')[2].partition("</script>")[0])
    drawn: dict[str, int] = {}
    for step in data["steps"]:
        assert escape(step["sentence"]) in text
        if step["axis"]:
            drawn[step["operation"]] = drawn.get(step["operation"], 0) + step["bytes"]
    counted = explained(term).counted()
    assert drawn == {op: size for op, (_, size) in counted.items()}
    assert data["ranks"] == case_of(term).plan.world_size and "default-src" in text


@pytest.mark.parametrize("term", TERMS)
def test_the_page_tells_what_the_terminal_tells(term: str) -> None:
    explanation = explained(term)
    page = explain_page.html(explanation)
    for text in (*held(explanation), *after(explanation)):
        assert escape(text) in page
    data = json.loads(page.partition('id="drawn">')[2].partition("</script>")[0])
    if explanation.schedule is None:
        assert "timelines" not in data
        return
    (timeline,) = data["timelines"]
    drawn = [[label for _, _, _, label, _, _ in lane["boxes"]] for lane in timeline["lanes"]]
    walked = [
        [str(action) for action in actions if action.kind in COMPUTE]
        for actions in explanation.schedule.ranks
    ]
    assert drawn == walked


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", "dp2", "--html", str(page)]) == 0
    assert "plan" in page.read_text()
    assert main(["explain", "dp2", "--html", str(tmp_path)]) == 2


def test_a_recording_can_be_printed_after_its_run() -> None:
    """It keeps memory whose contents ZeRO-3 has freed."""
    assert repr(explained("dp2:zero3")).startswith("Explanation(")


@pytest.mark.parametrize("term", ["dp4:local,every8", "dp8:local,every16"])
def test_a_long_round_of_ranks_by_themselves_stays_finite(term: str) -> None:
    record = explain(term).as_dict()
    assert all(math.isfinite(loss) for loss in record["losses"])
    assert record["losses"][-1] <= record["losses"][0]
    assert record["learning_rate"] < 0.125
