"""One HTML page of a verdict: the chain of modules, and error against depth for every kind.

The page stands alone: a picture in SVG, the findings, and a table of every module and tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from plait.verify.outside.modules import ModuleError
from plait.verify.report import Report

WIDTH = 760
HEIGHT = 180
LEAST = 1e-17

STYLE = """:root { color-scheme: light dark; --wrong: #fdd; --plain: #f7f7f7; --line: #36c }
@media (prefers-color-scheme: dark) {
:root { --wrong: #5a2326; --plain: #1c2024; --line: #6cb2ff } }
body { font: 15px sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em;
overflow-wrap: anywhere }
pre { white-space: pre-wrap }
pre, div { overflow-x: auto } svg { background: var(--plain); max-width: 100%; height: auto }
table { border-collapse: collapse } td, th { padding: 2px 12px; text-align: left }
tr.wrong td, li.wrong { background: var(--wrong) }
ol { display: flex; flex-wrap: wrap; gap: .4em; list-style: none; padding: 0 }
li { border: 1px solid #888; border-radius: 4px; padding: 2px 8px }
li.first { outline: 3px solid #d33 } svg { stroke: var(--line) } svg title { stroke: none }"""
HEAD = (
    "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
    "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
    "style-src 'unsafe-inline'\">"
)

Row = tuple[str, float, float]
"""Name, error, and the largest error that passes."""


def page(report: Report) -> str:
    """The page of a report and of its parts."""
    name = report.plan or report.title or "the parallel step"
    verdict = "equal to one device" if report.ok else "NOT equal to one device"
    parts = [f"<h1>{escape(name)}: {verdict}</h1>", f"<pre>{escape(report.text())}</pre>"]
    slack = report.module_slack
    outputs = [(one.name, one.output, slack) for one in report.modules if one.output is not None]
    grads = [(one.name, one.grad, slack) for one in report.modules if one.grad is not None]
    parts.append(_chain(report))
    parts.append(_section("Outputs of modules, forward order", outputs))
    parts.append(_section("Gradients of outputs, forward order", grads))
    for kind, title in (
        ("loss", "Loss, by step"),
        ("grad", "Gradients of parameters"),
        ("param", "Parameters after the update"),
    ):
        parts.append(_section(title, _rows(report, kind)))
    body = "\n".join(part for part in parts if part)
    return (
        f"<!doctype html><html lang='en'><head>{HEAD}<title>{escape(name)}</title>"
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _chain(report: Report) -> str:
    """All modules in forward order, the first wrong one marked, with ranks and micro-batches."""
    if not report.modules:
        return ""
    guilty = next((one.names[0] for one in report.findings if one.cause == "module"), None)
    boxes = []
    lines = []
    for one in report.modules:
        kind = "wrong" if one.ranks else "right"
        if one.name == guilty:
            kind += " first"
        boxes.append(f"<li class='{kind}'>{escape(one.name)}</li>")
        cells = (one.name, _shown(one.output), _shown(one.grad), *_places(one))
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr class='{kind}'>{row}</tr>")
    return (
        "<h2>Modules, forward order</h2>"
        f"<ol>{''.join(boxes)}</ol><table><tr><th>module</th><th>error of the output</th>"
        "<th>of its gradient</th><th>wrong on ranks</th><th>in micro-batches</th></tr>"
        f"{''.join(lines)}</table>"
    )


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


def _places(one: ModuleError) -> tuple[str, str]:
    return ", ".join(map(str, one.ranks)), ", ".join(map(str, one.calls))


def _rows(report: Report, kind: str) -> list[Row]:
    """The largest error of each tensor, in the order in which a model names them."""
    row_of: dict[str, Row] = {}
    for part in (report, *report.parts):
        for one in part.differences:
            if one.kind == kind:
                name = f"step {one.step}" if kind == "loss" else one.name
                limit = part.limit_of(one)
                if name not in row_of or one.error / limit > row_of[name][1] / row_of[name][2]:
                    row_of[name] = (name, one.error, limit)
    return list(row_of.values())


def _section(title: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        f"<tr{' class=wrong' if not error <= limit else ''}><td>{escape(name)}</td>"
        f"<td>{error:.2g}</td></tr>"
        for name, error, limit in rows
    ]
    table = "".join(lines)
    return (
        f"<h2>{escape(title)}</h2>{_picture(rows)}<table><tr><th>name</th><th>relative error"
        f"</th></tr>{table}</table>"
    )


def _picture(rows: Sequence[Row]) -> str:
    """Errors as a line on a logarithmic scale from 1e-17 to 10, what passes as a dashed one."""
    step = WIDTH / max(len(rows) - 1, 1)
    points = " ".join(f"{index * step:.1f},{_y(row[1]):.1f}" for index, row in enumerate(rows))
    limit = _y(max(row[2] for row in rows))
    dots = "".join(
        f"<circle cx='{index * step:.1f}' cy='{_y(row[1]):.1f}' r='3'>"
        f"<title>{escape(row[0])}: {row[1]:.2g}</title></circle>"
        for index, row in enumerate(rows)
    )
    return (
        f"<svg viewBox='-10 -10 {WIDTH + 20} {HEIGHT + 20}' width='{WIDTH}' height='{HEIGHT}'>"
        f"<line x1='0' x2='{WIDTH}' y1='{limit:.1f}' y2='{limit:.1f}' stroke='#888' "
        "stroke-dasharray='4'/>"
        f"<polyline points='{points}' fill='none'/>{dots}</svg>"
    )


def _y(error: float) -> float:
    value = min(max(error, LEAST), 10.0) if not math.isnan(error) else 10.0
    share = (math.log10(value) - math.log10(LEAST)) / (1 - math.log10(LEAST))
    return HEIGHT * (1 - share)
