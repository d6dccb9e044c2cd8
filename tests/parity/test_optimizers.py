"""Optimizers that a config names: Muon, groups without decay, a user's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.comm import World
from plait.config import Config, Train
from plait.engine.build import build
from plait.engine.options import Options
from plait.errors import OptimizerError
from plait.models import losses
from plait.models.parameters import Parameters
from plait.plan import Plan
from plait.run import optimizers
from plait.run.preflight import check_optimizer
from tests.parity.families import DEEP, EXPERT_FAMILIES, SPLIT_FAMILIES, Family
from tests.parity.harness import SEED, TOLERANCE, _copies, join, whole_model

Run = Callable[..., list[Any]]
EXPERTS = EXPERT_FAMILIES["deepseek-plain"]
GPT = DEEP["gpt-deep"]
EVEN = SPLIT_FAMILIES["gpt"]  # its sizes are what every tensor mode divides
SPARED = ("norm", "bias")
MUON_PLANS = [
    *("dp1", "dp2", "dp2:ring", "dp2:server", "pp2:1f1b mb2", "pp2 dp2:zero3"),
    *("dp2:zero1", "dp3:zero2 mb2", "dp2:zero3", "dp4:zero3,replicate2", "cp2 dp2:zero1"),
    *("tp2", "tp2:1d,sp dp2:zero1", "tp4:2d", "tp8:3d", "tp8:2.5d,depth2"),
    *("tp4:2d dp2:zero1", "tp2 dp2:zero2", "tp2 dp2:zero3 pp2:1f1b mb2", "pp2:zbv tp2 mb4"),
]
# An eps above rounding: gradients of key biases are zero but for the order of sums.
MUON = Train(optimizer="muon", lr=0.02, weight_decay=0.1, no_decay=SPARED, eps=1e-5)


def trained(
    world: World,
    plan: str,
    train: Train,
    family: Family = GPT,
    folder: Path | None = None,
    first: int = 0,
) -> Any:
    """The parameters after all steps; with a folder of one half, the other half's being there."""
    engine = build(
        family.model(),
        Plan.parse(f"{plan} precision:float64"),
        loss=losses.cross_entropy,
        optimizer=optimizers.from_config(train),
        options=Options(seed=SEED),
        world=world,
    )
    axis = world.axis("dp")
    batches = family.batches(8)
    if folder is not None:
        batches = batches[:1] if first == 0 else batches[1:]
    if folder is not None and first:
        engine.load(folder)
    for batch in batches:
        engine.step(tuple(one.tensor_split(axis.size)[axis.rank] for one in batch), trace=False)
    if folder is not None and not first:
        engine.save(folder)
    return _copies(engine.local_parameters())


def plainly(
    make: Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]], family: Family = GPT
) -> nn.Module:
    """One device, with torch's own optimizers."""
    model = whole_model(family)
    made = make(dict(model.named_parameters()))
    for inputs, targets in family.batches(8):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return model


def is_spared(name: str) -> bool:
    return any(word in name for word in SPARED)


def groups(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    decayed = [one for name, one in params.items() if not is_spared(name)]
    spared = [one for name, one in params.items() if is_spared(name)]
    both = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]


def muon_and_adamw(params: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = {n: p for n, p in params.items() if p.dim() == 2 and n.startswith("blocks.")}
    others = {n: p for n, p in params.items() if n not in matrices}
    assert matrices
    muon = torch.optim.Muon(groups(matrices), lr=0.02, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups(others), lr=0.02, eps=1e-5)]


def adamw(params: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(groups(params), lr=0.02, eps=1e-5)]


def check(results: list[Any], model: nn.Module) -> None:
    params = join(results)
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        values = params[name].view_as(expected)
        # Key biases have no gradient but for rounding, so they stay near zero: no scale of theirs.
        scale = max(float(expected.abs().max()), 1e-2)
        error = float((values - expected).abs().max()) / scale
        assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize("plan", MUON_PLANS)
def test_muon_equals_one_device(ranks: Run, plan: str) -> None:
    size = Plan.parse(plan).world_size
    check(ranks(size, trained, plan, MUON, EVEN, plan=plan), plainly(muon_and_adamw, EVEN))


@pytest.mark.parametrize("plan", ["dp2:zero1 ep2", "dp2:zero3 ep2", "tp2 dp2:zero2 ep2"])
def test_muon_beside_split_experts_equals_one_device(ranks: Run, plan: str) -> None:
    one = join(ranks(1, trained, "dp1", MUON, EXPERTS, plan="dp1"))
    found = join(ranks(Plan.parse(plan).world_size, trained, plan, MUON, EXPERTS, plan=plan))
    for name, values in found.items():
        torch.testing.assert_close(values, one[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("after", ["dp2", "pp2", "tp2", "dp2:zero3"])
def test_muon_goes_on_under_another_plan(ranks: Run, tmp_path: Path, after: str) -> None:
    folder = tmp_path / "saved"
    ranks(2, trained, "dp2:zero1", MUON, EVEN, folder, 0, plan="dp2")
    results = ranks(2, trained, after, MUON, EVEN, folder, 1, plan=after)
    check(results, plainly(muon_and_adamw, EVEN))


@pytest.mark.parametrize(("size", "plan"), [(2, "dp2:zero3"), (2, "dp2:zero1"), (2, "pp2 mb2")])
def test_parameters_are_spared_decay_by_name(ranks: Run, size: int, plan: str) -> None:
    train = replace_train(optimizer="adamw")
    check(ranks(size, trained, plan, train, plan=plan), plainly(adamw))


GROUPS = [
    {"match": "blocks.0.*.bias", "lr": 0.002, "weight_decay": 0.3},
    {"match": "blocks.0.*", "lr": 0.005},
    {"match": "norm*", "weight_decay": 0.0},
]
PART_FROZEN = replace(EVEN, frozen=("position.weight",))


def by_pattern(params: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    def settings(name: str) -> tuple[float, float]:
        if name.startswith("blocks.0."):
            return (0.002, 0.3) if name.endswith(".bias") else (0.005, 0.1)
        return 0.02, 0.0 if name.startswith("norm") else 0.1

    chosen = {name: settings(name) for name, param in params.items() if param.requires_grad}
    own = [
        {"params": [params[name]], "lr": lr, "weight_decay": decay}
        for name, (lr, decay) in chosen.items()
    ]
    return [torch.optim.AdamW(own, eps=1e-5)]


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero3", "tp2", "pp2 mb2", "tp4:2d"])
def test_groups_by_pattern_equal_one_device(ranks: Run, plan: str) -> None:
    train = replace_train(optimizer="adamw", no_decay=(), groups=GROUPS)
    size = Plan.parse(plan).world_size
    found = ranks(size, trained, plan, train, PART_FROZEN, plan=plan)
    check(found, plainly(by_pattern, PART_FROZEN))


def replace_train(**keys: Any) -> Train:
    return Train.model_validate({**MUON.model_dump(), **keys})


@pytest.mark.parametrize("plan", ["dp2:zero1,offload"])
def test_muon_is_refused_where_no_matrix_is_whole(plan: str) -> None:
    with pytest.raises(OptimizerError, match="muon updates whole matrices"):
        check_optimizer("muon", Plan.parse(plan))


def test_a_users_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Run) -> None:
    (tmp_path / "my_optimizers.py").write_text(
        "import torch\n"
        "def rmsprop(params):\n"
        "    return torch.optim.RMSprop(params, lr=0.01)\n"
        "def nothing(params):\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    params: Iterable[nn.Parameter] = [nn.Parameter(torch.zeros(2, 2))]
    made = optimizers.from_config(replace_train(optimizer="my_optimizers:rmsprop"))(params)
    assert isinstance(made, torch.optim.RMSprop)
    with pytest.raises(OptimizerError, match="returned a NoneType"):
        optimizers.from_config(replace_train(optimizer="my_optimizers:nothing"))(params)
    with pytest.raises(OptimizerError, match="my_optimizers:missing"):
        check_optimizer("my_optimizers:missing", Plan.parse("dp1"))


class Normed(torch.optim.Optimizer):
    """Plain descent by matrices of norm 1."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.05})
        self.params = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = {
            name: one
            for name, one in self.params.named()
            if len(self.params.whole_shape(name, one)) == 2
        }
        grads = {name: one.grad for name, one in params.items() if one.grad is not None}
        if self.params.whole is None:
            made = {name: F.normalize(grad, dim=(0, 1)) for name, grad in grads.items()}
        else:
            made = self.params.whole.apply(grads, lambda grad: F.normalize(grad, dim=(0, 1)))
        for name, value in made.items():
            params[name].add_(value, alpha=-self.param_groups[0]["lr"])


def normed(params: Parameters) -> Normed:
    return Normed(params)


normed.needs_whole = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", ["dp2:zero1", "tp2"])
def test_a_users_own_optimizer_of_whole_matrices(ranks: Run, plan: str) -> None:
    own = replace_train(optimizer=f"{__name__}:normed")
    one = join(ranks(1, trained, "dp1", own, EVEN, plan="dp1"))
    for name, values in join(ranks(2, trained, plan, own, EVEN, plan=plan)).items():
        torch.testing.assert_close(values, one[name], rtol=TOLERANCE, atol=1e-12)


class Slowing(torch.optim.Optimizer):
    """Descent by a rate that falls with a count of steps, kept in the groups."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["step"])


def slowing(params: Iterable[nn.Parameter]) -> Slowing:
    return Slowing(params)


@pytest.mark.parametrize("after", ["dp1", "dp2:zero3", "tp2", "pp2:1f1b mb2"])
def test_a_checkpoint_holds_what_an_optimizer_counts_in_its_groups(
    ranks: Run, tmp_path: Path, after: str
) -> None:
    own = replace_train(optimizer=f"{__name__}:slowing")
    one = join(ranks(1, trained, "dp1", own, EVEN, plan="dp1"))
    folder = tmp_path / "saved"
    ranks(2, trained, "dp2:zero1", own, EVEN, folder, 0, plan="dp2")
    size = Plan.parse(after).world_size
    results = join(ranks(size, trained, after, own, EVEN, folder, 1, plan=after))
    for name, values in results.items():
        torch.testing.assert_close(values, one[name], rtol=TOLERANCE, atol=1e-12)


def test_an_optimizer_of_whole_tensors_that_does_not_say_so_is_refused_under_tp() -> None:
    def norms(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params, lr=0.01)

    with pytest.raises(OptimizerError, match="Adafactor is not elementwise"):
        build(EVEN.model(), "tp2", loss=losses.cross_entropy, optimizer=norms)


def test_the_config_takes_them() -> None:
    keys = {"optimizer": "muon", "no_decay": ["norm", "bias"], "global_batch": 8}
    model = {"name": "mlp", "in_features": 2, "hidden_size": 4, "num_hidden_layers": 1}
    config = Config.load({"model": {**model, "out_features": 2}, "train": keys})
    assert Config.load(config.as_dict()).train.no_decay == ("norm", "bias")
    assert replace(config, train=config.train).train.optimizer == "muon"
