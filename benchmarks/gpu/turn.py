"""One process of the GPU tables: a model under one system, or a strategy beside one rank."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from benchmarks.gpu.models import SUBJECTS, Subject
from plait import comm
from plait.comm import World
from plait.engine.build import Options, build
from plait.launcher import launch
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.plan import Plan

WARM = 3
STEPS = 10
Step = Callable[[], Any]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def plait_step(subject: Subject, device: str) -> Step:
    """A step of the engine, blocks compiled, in bf16 with float32 masters."""
    world = comm.init(Mesh(), device=_place(device))
    plan = f"dp1 precision:bf16{' compile' if device == 'cuda' else ''}"
    model = subject.model("meta")
    engine = build(model, plan, loss=cross_entropy, optimizer=adamw, world=world)
    batch = subject.tokens(_place(device))
    return lambda: engine.step(batch, trace=False)


def step_by_hand(subject: Subject, device: str) -> Step:
    """A loop as it is written without a library: compiled blocks, autocast, float32 parameters."""
    model: Any = subject.model(_place(device))
    if device == "cuda":
        for block in model.blocks:
            block.compile()
    optimizer = adamw(model.parameters())
    inputs, targets = subject.tokens(_place(device))

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speed(subject: Subject, system: str, device: str) -> dict[str, object]:
    """Tokens a second in the median step, and the peak of memory."""
    make = plait_step if system == "plait" else step_by_hand
    step = make(subject, device)
    seconds = []
    for index in range(WARM + STEPS):
        if index == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        if index >= WARM:
            seconds.append(time.perf_counter() - began)
    middle = sorted(seconds)[len(seconds) // 2]
    answer: dict[str, object] = {
        "tokens_per_second": subject.batch * subject.seq_len / middle,
        "peak_bytes": _peak(device),
    }
    if system == "plait" and device == "cuda":
        answer["predicted"] = predicted(subject, middle, _peak(device))
    return answer


def predicted(subject: Subject, seconds: float, peak: int) -> str:
    """The planner's step and memory over the measured ones."""
    name = torch.cuda.get_device_name(0).lower()
    preset = next((one for one in ("h200", "h100", "b200", "l40s") if one in name), "a100-80gb")
    guess = plait.estimate(subject.config(), "dp1 precision:bf16 compile", f"{preset}x1")
    return f"{guess.step_seconds / seconds:.2f}, {guess.memory.total / peak:.2f} ({preset})"


def difference(text: str, device: str) -> float:
    """The largest relative difference of a parameter after two steps, from one rank's."""
    plan = Plan.parse(f"{text} precision:float64")
    ranks = launch(trained, str(plan), device, nproc=plan.world_size)
    alone = launch(trained, "dp1 precision:float64", device, nproc=1)[0]
    largest = 0.0
    for own in ranks:
        for name, index, values in own:
            whole = next(parts for other, _, parts in alone if other == name)
            expected = whole[index]
            scale = max(float(whole.abs().max()), 1e-2)
            largest = max(largest, float((values - expected).abs().max()) / scale)
    return largest


def trained(text: str, device: str) -> list[tuple[str, Any, Tensor]]:
    """The parts of parameters of this rank after two steps: name, index in the flat whole, values.

    All ranks share the one device, over Gloo.
    """
    torch.set_num_threads(1)
    plan = Plan.parse(text)
    place = _place(device)
    world: World = comm.init(Mesh.of(plan), device=place, backend="gloo")
    subject = replace(SUBJECTS[1].small(), batch=8)
    model: nn.Module = subject.model("meta")
    options = Options(blocks="blocks.*")
    engine = build(model, plan, loss=cross_entropy, optimizer=adamw, options=options, world=world)
    index, count = world.worker
    inputs, targets = (part.tensor_split(count)[index] for part in subject.tokens(place))
    for _ in range(2):
        engine.step((inputs, targets), trace=False)
    parts = engine.local_parameters()
    return [(part.name, part.index(), part.values.detach().cpu()) for part in parts]


def _place(device: str) -> str:
    return "cuda:0" if device == "cuda" else "cpu"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Answer the question of the command line, as one line of JSON."""
    question = json.loads(sys.argv[1])
    device = question["device"]
    if "plan" in question:
        answer: dict[str, object] = {"difference": difference(question["plan"], device)}
    else:
        subject = SUBJECTS[question["subject"]]
        if device == "cpu":
            subject = subject.small()
        answer = speed(subject, question["system"], device)
    print(json.dumps(answer))
