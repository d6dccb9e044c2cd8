"""The steps that the GPU tables compare: those of plait, and loops written without a library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.models import Subject
from plait import comm
from plait.engine.build import Options, build
from plait.engine.graphs import WARM_UP_STEPS
from plait.mesh import Mesh
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt
from plait.models.losses import cross_entropy


@dataclass
class Steps:
    """A system that is built: its step, its model's flops in one, and how it is left."""

    step: Callable[[], Any]
    flops: float
    close: Callable[[], None] = lambda: None


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def place(device: str) -> str:
    return "cuda:0" if device == "cuda" else "cpu"


def backend(device: str) -> str:
    """Of torch.compile: a processor's trial traces as a GPU does, and writes no code."""
    return "inductor" if device == "cuda" else "aot_eager"


def plait_steps(
    subject: Subject,
    device: str,
    precision: str = "bf16",
    *,
    graphs: bool = False,
    defers: bool | None = None,
) -> Steps:
    """The engine, blocks compiled, bf16 with float32 masters; adapters where the subject has them.

    With `precision` fp8 the linear layers of blocks multiply in eight bits. Values are drawn on the
    device. A frozen base is made in bf16. `defers` is `Options.defer_reads`.
    """
    world = comm.init(Mesh(), device=place(device))
    model = subject.model(place(device), torch.bfloat16 if subject.rank else torch.float32)
    flops = subject.flops(model)
    if subject.rank:
        adapt(model, AdapterSettings(rank=subject.rank))
    engine = build(
        model,
        f"dp1 precision:{precision} compile",
        loss=cross_entropy,
        optimizer=adamw,
        options=Options(compile_backend=backend(device), cuda_graphs=graphs, defer_reads=defers),
        world=world,
    )
    batch = subject.tokens(place(device))
    return Steps(lambda: engine.step(batch, trace=False), flops, world.close)


def plait_steps_in_graphs(subject: Subject, device: str, *, defers: bool | None = None) -> Steps:
    """The engine, as in `plait_steps`, with a CUDA graph, which is recorded here."""
    made = plait_steps(subject, device, graphs=True, defers=defers)
    for _ in range(WARM_UP_STEPS + 1):
        made.step()
    return made


def plait_steps_in_eight_bits(subject: Subject, device: str) -> Steps:
    """The engine, as in `plait_steps`, with products in eight bits."""
    return plait_steps(subject, device, "fp8")


def autocast_steps(subject: Subject, device: str) -> Steps:
    """Compiled blocks, autocast to bf16, float32 parameters, fused AdamW."""
    model: Any = subject.model(place(device))
    flops = subject.flops(model)
    _compile(model, device)
    optimizer = adamw(model.parameters())
    return Steps(_autocast_step(model, optimizer, subject.tokens(place(device)), device), flops)


def _compile(model: Any, device: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend(device))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _autocast_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], device: str
) -> Callable[[], None]:
    inputs, targets = batch

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(inputs)
        _loss(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bf16_steps(subject: Subject, device: str) -> Steps:
    """Compiled blocks, bf16 parameters, float32 masters that one foreach copies back."""
    model: Any = subject.model(place(device))
    flops = subject.flops(model)
    masters = [nn.Parameter(param.detach()) for param in model.parameters()]
    model.to(torch.bfloat16)
    _compile(model, device)
    params = list(model.parameters())
    optimizer = adamw(masters)
    inputs, targets = subject.tokens(place(device))

    def step() -> None:
        _loss(model(inputs), targets).backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        optimizer.zero_grad(set_to_none=True)

    return Steps(step, flops)


class LowRank(nn.Module):
    """A frozen linear layer and its adapter: W x + B A x, [..., in] -> [..., out]."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        out, into = base.weight.shape
        device = base.weight.device
        self.a = nn.Parameter(torch.empty(rank, into, device=device, dtype=torch.float32))
        self.b = nn.Parameter(torch.zeros(out, rank, device=device, dtype=torch.float32))
        nn.init.normal_(self.a, std=into**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        low = F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        return self.base(x) + low


def _inner_linears(model: nn.Module) -> Iterable[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of blocks, with the module and the name that have them."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            owner, _, key = name.rpartition(".")
            yield model.get_submodule(owner), key, module


def own_adapter_steps(subject: Subject, device: str) -> Steps:
    """Adapters written by hand: frozen bf16 base, float32 adapters that are cast where used."""
    model: Any = subject.model(place(device), torch.bfloat16).requires_grad_(False)
    flops = subject.flops(model)
    for owner, key, linear in list(_inner_linears(model)):
        setattr(owner, key, LowRank(linear, subject.rank))
    _compile(model, device)
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    inputs, targets = subject.tokens(place(device))

    def step() -> None:
        _loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Steps(step, flops)


def peft_steps(subject: Subject, device: str) -> Steps:
    """Adapters of PEFT under autocast: frozen bf16 base, float32 adapters, as its trainers do."""
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = subject.model(place(device), torch.bfloat16)
    flops = subject.flops(model)
    names = sorted({key for _, key, _ in _inner_linears(model)})
    config = LoraConfig(r=subject.rank, lora_alpha=subject.rank, target_modules=names)
    model = inject_adapter_in_model(config, model)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
        if param.requires_grad:
            param.data = param.data.float()
    _compile(model, device)
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    return Steps(_autocast_step(model, optimizer, subject.tokens(place(device)), device), flops)


def adapter_numbers(subject: Subject) -> tuple[int, int]:
    """The numbers that adapters train, and those of the frozen base."""
    model = subject.model("meta")
    frozen = sum(param.numel() for param in model.parameters())
    adapt(model, AdapterSettings(rank=subject.rank))
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return trained, frozen
