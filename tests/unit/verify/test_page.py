"""The page of a verdict."""

from __future__ import annotations

from plait.verify.diagnosis.finding import Finding
from plait.verify.outside.modules import ModuleError
from plait.verify.page import page
from plait.verify.record.compare import Difference
from plait.verify.report import Report


def test_a_page_shows_what_differs_and_what_does_not() -> None:
    found = [Difference(0, "grad", "<a>.weight", 0.5), Difference(0, "param", "b", 1e-16)]
    modules = (ModuleError("block", 0, 1e-17, 0.2), ModuleError("head", 1, 1e-16, None))
    text = page(Report(found, [], [], 1e-10, 1, plan="mine", modules=modules))
    assert "<h1>mine: NOT equal to one device</h1>" in text
    assert "<tr class=wrong><td>&lt;a&gt;.weight</td><td>0.5</td></tr>" in text
    assert "<tr><td>b</td><td>1e-16</td></tr>" in text
    assert "<tr class=wrong><td>block</td><td>0.2</td></tr>" in text
    assert text.count("<svg") == 4


def test_the_chain_marks_the_first_wrong_module_with_its_ranks_and_micro_batches() -> None:
    modules = (
        ModuleError("embed", 0, 1e-17, 1e-9),
        ModuleError("block<1>", 1, 0.25, 0.5, (1, 3), (0, 2)),
        ModuleError("head", 2, 0.125, None, (1,), (2,)),
    )
    found = Finding("module", "", "the first output that differs", 0.985, ("block<1>",))
    wrong = [Difference(0, "loss", "loss", 0.5)]
    text = page(Report(wrong, [], [found], 1e-10, 1, plan="mine", modules=modules))
    assert "<li class='right'>embed</li><li class='wrong first'>block&lt;1&gt;</li>" in text
    row = "<td>block&lt;1&gt;</td><td>0.25</td><td>0.5</td><td>1, 3</td><td>0, 2</td>"
    assert f"<tr class='wrong first'>{row}</tr>" in text
    assert "<tr><td>embed</td><td>1e-09</td></tr>" in text  # a gradient that passes is not marked
