"""A base in 8 or 4 bits against PEFT on one device, on weights that the library rounded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import build
from plait.engine.composition import check_coded
from plait.errors import NotAvailable
from plait.models import adapter_files
from plait.models.adapter_parts import BASES, AdapterSettings
from plait.models.adapters import linear_layers
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity import beside_peft
from tests.parity import test_adapters as adapters
from tests.parity.harness import TOLERANCE, join, optimizer

library = pytest.importorskip(
    "bitsandbytes.functional", reason="a base in 8 or 4 bits needs bitsandbytes"
)
pytest.importorskip("peft")
pytest.importorskip("transformers")

OUTPUTS = ("head", "lm_head")
PRODUCTS = ["tp2 dp2:zero3", "pp2:1f1b tp2:1d,sp mb2", "pp2:zb-h1 dp2:zero1 mb2 remat:full"]
CASES = [
    *[("own", "nf4", plan) for plan in ("dp1", "dp2", "dp4:zero3,replicate2")],
    *[("own", "int8", plan) for plan in ("tp2", "cp2:ring")],
    *[("wide", "nf4", plan) for plan in ("dp2:zero3", "tp2", "tp2 dp2:zero3")],
    ("moe", "nf4", "dp2:zero3 ep2"),
]
LONG = [
    *[("own", "nf4", plan) for plan in ("dp2:server", "dp2:ring")],
    *[("own", "int8", plan) for plan in ("dp2:zero1", "tp8:2.5d,depth2")],
    *[("wide", "nf4", plan) for plan in ("tp4:2d", "tp8:3d", *PRODUCTS[1:])],
    *[("wide", "int8", plan) for plan in ("dp2:zero3", "tp4:2d", "pp2:1f1b mb2")],
    *[("moe", "nf4", plan) for plan in ("dp2 ep2", "tp2 dp2:zero1 ep2")],
    *[("llama", "nf4", plan) for plan in ("dp2:zero3", "tp2:1d,sp", "pp2 mb2")],
    *[("qwen2", "int8", plan) for plan in ("cp2:ulysses tp2 dp2:zero3", "tp4:2d")],
    *[("phi3", "nf4", plan) for plan in ("tp2", "tp8:3d")],
    *[("gpt2", "nf4", plan) for plan in ("tp2", "tp8:2.5d,depth2")],
]


def rounded(weight: Tensor, base: str) -> Tensor:
    """A weight of float64 in the numbers of the library, each row in blocks of 64."""
    columns = weight.shape[1]
    rows = F.pad(weight.float(), (0, -columns % 64)).contiguous()
    if base == "nf4":
        numbers = library.dequantize_4bit(
            *library.quantize_4bit(rows, blocksize=64, quant_type="nf4")
        )
    else:
        numbers = library.dequantize_blockwise(*library.quantize_blockwise(rows, blocksize=64))
    return numbers[:, :columns].to(weight)


def round_linears(model: nn.Module, base: str) -> None:
    """Round the weight of every linear layer but the output."""
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and name.rpartition(".")[2] not in OUTPUTS:
            weight: Any = module.weight
            weight.data = rounded(weight.data, base)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str, base: str) -> adapters.Reference:
        folder = tmp_path_factory.mktemp(f"{family}-{base}")
        change: Callable[[nn.Module], None] = functools.partial(round_linears, base=base)
        return adapters.Reference(family, "lora", folder, change)

    return make


def make_model(family: str, base: str, folder: Path) -> nn.Module:
    model = adapters.base_of(family)
    if adapter_files.is_wrapped(model):
        files = folder / "base"
        model.model.save_pretrained(files)
        model = models.make("hf", config=files, weights=files)
    settings = replace(adapters.settings(family, "lora", folder), base=base)
    return adapter_files.with_adapters(model, settings)


@pytest.mark.parametrize(
    ("family", "base", "plan"),
    [*CASES, *[pytest.param(*case, marks=pytest.mark.long) for case in LONG]],
)
def test_training_is_that_of_peft_on_a_rounded_base(
    family: str, base: str, plan: str, reference: Any, ranks: Any
) -> None:
    truth = reference(family, base)
    model = make_model(family, base, truth.folder)
    names = adapter_files.peft_names(model)
    parsed = Plan.parse(plan)
    run = threaded if parsed.pp.size == 1 else ranks
    results = run(parsed.world_size, adapters.train, plan, model, plan=plan)
    found = join([parts for _, parts, _ in results])
    assert set().union(*(owned for *_, owned in results)) == set(names)
    for losses_of_rank, *_ in results:
        torch.testing.assert_close(losses_of_rank, truth.losses, rtol=TOLERANCE, atol=0)
    for name, peft_name in names.items():
        expected = truth.state[peft_name].flatten()
        error = (found[name] - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE, (name, float(error))


def held_bytes(world: World, plan: str, base: str) -> tuple[int, list[int]]:
    """A rank's bytes of parameters between steps, and those of the numbers of the frozen layers
    that are there before and after each block, in forward and in backward.
    """
    with torch.device("meta"):
        model = models.make(**{**adapters.FAMILIES["wide"], "num_hidden_layers": 6})
    adapter_files.with_adapters(model, AdapterSettings(rank=4, base=base))
    engine = build(
        model,
        f"{plan} precision:bf16",
        loss=beside_peft.logits_loss,
        optimizer=optimizer,
        world=world,
    )
    layers = [m.weight for m in linear_layers(model).values() if m is not model.head]
    found: list[int] = []

    def count(*_: object) -> None:
        storages = [layer.untyped_storage() for layer in layers if not layer.requires_grad]
        found.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))

    def around(module: nn.Module, args: Any, output: Tensor) -> None:
        count()
        output.register_hook(count)

    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(count)
        block.register_forward_hook(around)
        block.mlp.down.register_forward_pre_hook(count)
    inputs, targets = beside_peft.batch()
    axis = world.axis("dp")
    mine = tuple(part.tensor_split(axis.size)[axis.rank] for part in (inputs, targets))
    engine.step(mine, trace=False)
    return engine.memory()["parameters"], found


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3", "dp1 remat:full"])
def test_numbers_of_two_blocks_at_most_are_there(plan: str) -> None:
    """A block of the model has 4 * 128 * 128 + 3 * 128 * 192 frozen numbers in linear layers."""
    block = 4 * 128 * 128 + 3 * 128 * 192
    size = Plan.parse(plan).world_size
    held = {base: threaded(size, held_bytes, plan, base, plan=plan)[0] for base in BASES}
    for base, num_bytes in (("int8", 1 + 4 / 64), ("nf4", 1 / 2 + 4 / 64)):
        saved = held["none"][0] - held[base][0]
        assert saved == 6 * block * (2 - num_bytes) / size
        assert len(held[base][1]) == 6 * (5 if "remat" in plan else 4)
        assert max(held[base][1]) <= 2 * 2 * block


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("dp2:local,every2", "ranks that step together"),
        ("pp2:pipedream mb2", "schedules that flush"),
        ("dp2 precision:fp8", "round them again"),
    ],
)
def test_plans_that_a_base_in_codes_does_not_go_with(plan: str, reason: str) -> None:
    with pytest.raises(NotAvailable, match=f"a base in nf4 .*{reason}"):
        check_coded(Plan.parse(plan), {"layer.weight": "nf4"})


def merged_on_two_ranks(world: World, model: nn.Module, out: Path) -> None:
    engine = build(
        copy.deepcopy(model),
        "dp2:zero3 precision:float64",
        loss=beside_peft.logits_loss,
        optimizer=optimizer,
        world=world,
    )
    engine.save_pretrained(out, merge=True)


def test_merged_weights_are_numbers_of_codes_with_the_adapter(
    reference: Any, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    truth = reference("own", "nf4")
    model = make_model("own", "nf4", truth.folder)
    threaded(2, merged_on_two_ranks, model, tmp_path, plan="dp2:zero3")
    found = safetensors.load_file(tmp_path / "model.safetensors")
    layers = {name: m for name, m in linear_layers(model).items() if "lora" not in name}
    for name, layer in layers.items():
        weight: Any = layer.weight
        base = weight.detach() if name in OUTPUTS else rounded(weight.detach(), "nf4")
        adapted: Any = layer
        if hasattr(layer, "lora_A"):
            base = base + 2 * adapted.lora_B.weight @ adapted.lora_A.weight
        torch.testing.assert_close(found[f"{name}.weight"], base, rtol=1e-12, atol=1e-15)
