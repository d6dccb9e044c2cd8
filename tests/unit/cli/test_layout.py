"""Answers in a terminal of 80 columns: no line is wider, no plan and no head is broken."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from plait.cli import compare, estimate, federated, plan, probe, report, schedule, train
from plait.cli.entry import show
from plait.cli.layout import PlanTable, wrapped
from plait.parallel.pipeline import schedules
from plait.parallel.pipeline.simulate import simulate
from tests.unit.cli.test_comparison import row

COLUMNS = 80
LONG = "pp8:interleaved,v2 tp8:1d,sp dp4:zero1 mb64 remat:selective precision:bf16"
PLANS = ("dp1", "dp2:zero3 mb2", LONG)


def shown(view: RenderableType, columns: int = COLUMNS, terminal: bool = True) -> list[str]:
    file = io.StringIO()
    console = Console(
        file=file, width=columns, force_terminal=terminal, color_system=None, highlight=False
    )
    show(view, console)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def predicted(text: str) -> dict[str, Any]:
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer", "activations", "buffers", "total"), 123.4e9
    )
    return {
        "plan": text,
        "step_seconds": 12.34567,
        "tokens_per_second": 12345678.9,
        "unit": "tokens",
        "tflops_per_device": 123.4,
        "mfu": 0.4567,
        "mfu_causal": 0.4321,
        "bubble_fraction": 0.123,
        "memory": memory,
        "memory_limit": 80e9,
        "fits": False,
        "fits_probability": 0.123,
        "bars": {"step_seconds": [1.234, 12.34], "memory_total": [12.3e9, 1234.5e9]},
        "traffic": dict.fromkeys(("dp", "pp", "tp", "cp", "ep"), 123.4e9),
        "cost_per_million_tokens": 0.1234567,
        "breakdown_seconds": dict.fromkeys(("compute", "bubble", "tensor", "data", "host"), 2.4),
        "notes": [f"plait train would refuse this: {LONG} has no such thing; leave it out"],
    }


def chosen() -> dict[str, Any]:
    return {
        "plans": [predicted(text) for text in PLANS],
        "cluster": "h100x256",
        "num_devices": 256,
        "searched": {"plans": 5200, "combinations": 120, "too_large": 43},
        "explanation": [f"{LONG} loses 39%: 25% to waiting for the host to launch kernels"],
        "notes": ["the batch is assumed to be 256 samples, as the config says nothing about it"],
    }


def trained() -> dict[str, Any]:
    traffic = dict.fromkeys(("dp", "pp", "tp", "cp", "ep"), 123.4e6)
    return {
        **row(LONG),
        "traffic": traffic,
        "steps": 200,
        "steps_here": 100,
        "out": "runs/here",
    }


def measured() -> dict[str, Any]:
    link = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}
    return {
        "num_devices": 2,
        "name": "A processor with a name that is long",
        "is_cpu": True,
        "peak_flops": {"float32": 1e11, "bf16": 1e12},
        "memory_bandwidth": 1e10,
        "memory_bytes": 1e10,
        "measured": {"axes": {"dp": {"ops": dict.fromkeys(("all_reduce", "send"), link)}}},
    }


def reported() -> dict[str, Any]:
    times = {
        f"{kind}_{value}": None if kind == "predicted" else 0.5
        for kind in ("predicted", "simulated", "measured")
        for value in ("step_seconds", "bubble_fraction")
    }
    return {**times, "predicted_for": None, "out": "runs/here/report.html"}


def rounds() -> dict[str, Any]:
    return {
        "rounds": [1, 2],
        "accuracy": 0.5,
        "client_accuracy_worst": 0.4,
        "sent_bytes": 123456789,
        "received_bytes": 123456789,
        "epsilon": 1.0,
    }


def grid(name: str) -> RenderableType:
    made = schedules.make(name, 4, 8)
    return schedule._view(made, simulate(made))


def compared() -> PlanTable:
    traffic = dict.fromkeys(("dp", "pp", "tp"), 12345.6e6)
    return compare.view([{**row(text), "traffic": traffic} for text in PLANS])


VIEWS = {
    "compare": (compared, PLANS),
    "plan": (lambda: plan._view(chosen()), PLANS),
    "estimate": (lambda: estimate._view(predicted(LONG)), (LONG,)),
    "train": (lambda: train.view(trained()), (LONG,)),
    "probe": (lambda: probe.view(measured(), Path("probe.json")), ()),
    "report": (lambda: report.view(reported(), "this machine has not been measured yet " * 3), ()),
    "federated": (lambda: federated.view(rounds()), ()),
    "schedule": (lambda: grid("zbv"), ()),
}


@pytest.mark.parametrize("verb", VIEWS)
def test_a_table_fits_80_columns_and_breaks_no_plan(verb: str) -> None:
    make, plans = VIEWS[verb]
    lines = shown(make())
    assert max(map(len, lines)) <= COLUMNS, "\n".join(lines)
    for text in plans:
        assert any(text in line for line in lines), "\n".join(lines)


def test_a_wide_terminal_has_a_plan_and_its_numbers_on_one_line() -> None:
    for lines in (shown(compared(), columns=200), shown(compared(), terminal=False)):
        assert len(lines) == 1 + len(PLANS)
        assert lines[-1].startswith(LONG) and "12,346" in lines[-1]


def test_text_in_a_file_is_whole_and_on_a_terminal_broken_between_words() -> None:
    text = "note   " + "word " * 40
    assert shown(text, terminal=False) == [text.rstrip()]
    assert wrapped("note   one two", 10) == "note   one\n       two"
    assert wrapped("plan   dp2 tp2 mb8", 14) == "plan\n   dp2 tp2 mb8"


def test_the_legend_names_what_the_grid_shows() -> None:
    words = {
        name: " ".join(schedule.legend(schedules.make(name, 2, 4)))
        for name in ("gpipe", "zb-h1", "pipedream")
    }
    assert "B backward" in words["gpipe"] and "weight gradient" not in words["gpipe"]
    assert "U:" not in words["gpipe"] and "U:" in words["pipedream"]
    assert "B backward" not in words["zb-h1"] and "F = I = W = 1" in words["zb-h1"]


def test_prices_are_in_dollars() -> None:
    assert "USD" in " ".join(shown(plan._view(chosen())))
    assert "USD" in " ".join(shown(estimate._view(predicted("dp2"))))
