"""The page of a verdict."""

from __future__ import annotations

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
