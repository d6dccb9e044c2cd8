"""Where a step waits for the device: synchronising calls, by the line of plait that makes them."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import plait
from benchmarks.gpu.child import Turn
from benchmarks.gpu.models import SUBJECTS, Subject
from benchmarks.gpu.steps import adamw, backend, place
from plait import comm
from plait.engine.build import Options, build
from plait.mesh import Mesh
from plait.models.losses import cross_entropy

STEPS = 3
Places = Counter[tuple[str, str]]
"""Lines of plait with their calls, and how often each waited."""
HOME = str(Path(plait.__file__).parent) + "/"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES: tuple[tuple[str, str, dict[str, int], float | None], ...] = (
    ("Llama", "dp1 precision:bf16", {}, None),
    ("Llama, clipped", "dp1 precision:bf16", {}, 1.0),
    ("Llama, micro-batches", "dp1 precision:bf16 mb2", {}, None),
    ("Llama, compiled", "dp1 precision:bf16 compile", {}, None),
    ("Llama with experts", "dp1 precision:bf16", EXPERTS, None),
)


Found = list[tuple[str, str, "Places | Exception"]]
"""The title and plan of each case, and its places or its error."""


def prepare(device: str, number: str) -> Found:
    """Count: no time is measured, so that others may be at work."""
    found: Found = []
    for title, plan, keys, clip in CASES:
        try:
            found.append((title, plan, _count(device, plan, keys, clip)))
        except Exception as error:  # the next case may go well
            found.append((title, plan, error))
    return found


def measure(turn: Turn, number: str) -> None:
    """The table of places."""
    turn.record.head(
        f"waiting for the device, {STEPS} steps after two",
        ("model", "plan", "place", "times a step", "call"),
    )
    for title, plan, found in turn.ready or []:
        if isinstance(found, Exception):
            turn.record.failed(f"{title}, {plan}", found)
            continue
        for (where, call), times in found.most_common():
            turn.record.row(title, plan, where, f"{times / STEPS:.1f}", call)
            turn.record.keep(model=title, plan=plan, place=where, a_step=times / STEPS, call=call)
        if not found:
            told = "none" if turn.device == "cuda" else "none: a processor never waits"
            turn.record.row(title, plan, told, 0, "")
            turn.record.keep(model=title, plan=plan, place=None, a_step=0)


def _count(device: str, plan: str, keys: dict[str, int], clip: float | None) -> Places:
    subject: Subject = replace(SUBJECTS[1].small().with_keys(**keys), batch=4)
    world = comm.init(Mesh(), device=place(device))
    try:
        engine = build(
            subject.model(place(device)),
            plan,
            loss=cross_entropy,
            optimizer=adamw,
            options=Options(clip_grad_norm=clip, compile_backend=backend("cpu")),
            world=world,
        )
        batch = subject.tokens(place(device))
        for _ in range(2):
            engine.step(batch, trace=False)
        with counted(device) as places:
            for _ in range(STEPS):
                engine.step(batch, trace=False)
    finally:
        world.close()
    return places


@contextmanager
def counted(device: str) -> Iterator[Places]:
    """Count the synchronising calls made inside, by the innermost line of plait."""
    places: Places = Counter()

    def show(message: object, *_: object) -> None:
        if "called a synchronizing" not in str(message):
            return
        frames = traceback.extract_stack()[:-1]
        own = [one for one in frames if one.filename.startswith(HOME)]
        inner = own[-1] if own else frames[-1]
        name = inner.filename.removeprefix(HOME)
        places[f"{name}:{inner.lineno} {inner.name}", (inner.line or "")[:60]] += 1

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = before
