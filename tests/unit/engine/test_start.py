"""A model starts from the values that its own code gives it, under every plan."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.stages.cut import Cutting
from plait.engine.state.init import Initializer, place_holders
from plait.errors import ModelError
from plait.models.losses import cross_entropy
from plait.run import assemble
from tests.helpers.threaded import threaded
from tests.parity.harness import join

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)
        self.register_buffer("noise", torch.randn(width))
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=3.0)
            nn.init.zeros_(module.bias)

    def forward(self, x):
        return self.head(self.down(torch.tanh(self.up(x + self.noise))))

ROLES = {"up": "column", "down": "row", "head": "replicated"}

def make(width=4):
    return Net(width)

def silent():
    net = Net(4)
    del net.noise
    net.noise = 0.5
    return net
"""
PLANS = ["dp1", "dp2", "dp2:zero3", "dp2:server", "tp2", "pp2:1f1b mb2"]
SEED = 7
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 32,
}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's module, on the path."""
    name = f"net_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return __import__(name)


def plain(function: Any) -> nn.Module:
    """What plain PyTorch starts from."""
    torch.manual_seed(SEED)
    model: nn.Module = function()
    return model


def made(world: World, plan: str, model: nn.Module) -> Engine:
    return build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(seed=SEED, cutting=Cutting(example=torch.zeros(1, 4))),
        world=world,
    )


def started(world: World, plan: str, model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    engine = made(world, plan, copy.deepcopy(model))
    parts = [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]
    return parts, dict(engine.model.named_buffers())


def assert_start(found: list[Any], expected: nn.Module) -> None:
    values = join([parts for parts, _ in found])
    for name, param in expected.named_parameters():
        assert torch.equal(values[name], param.detach().flatten()), name
    for _, buffers in found:
        for name, buffer in expected.named_buffers():
            assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("function", ["make", "silent"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_initialises_itself_starts_as_in_plain_pytorch(
    plan: str, function: str, theirs: Any
) -> None:
    """With a buffer of its own, and with nothing that every module could not make anew."""
    model = assemble.make_model({"python": f"{theirs.__name__}:{function}"}, SEED)
    size = 1 if plan == "dp1" else 2
    assert_start(threaded(size, started, plan, model, plan=plan), plain(getattr(theirs, function)))


def test_the_global_random_state_stays_as_it_was(theirs: Any) -> None:
    torch.manual_seed(1)
    assemble.make_model({"python": f"{theirs.__name__}:make"}, SEED)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


def test_models_are_initialised_by_name_where_their_module_says_so(theirs: Any) -> None:
    theirs.INITIALISE_BY_NAME = True
    model = assemble.make_model({"python": f"{theirs.__name__}:make"}, SEED)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("plan", ["dp2", "tp2"])
def test_all_ranks_train_the_values_of_the_first_and_are_told(plan: str, theirs: Any) -> None:
    torch.manual_seed(0)
    own = [theirs.make(), theirs.make()]
    own[1].down.load_state_dict(own[0].down.state_dict())
    with pytest.warns(UserWarning, match=r"rank 1 brought .* noise, up.weight, head.weight; seed"):
        found = threaded(2, lambda world: started(world, plan, own[world.rank]), plan=plan)
    assert_start(found, own[0])


def test_a_split_model_keeps_no_whole_parameter(theirs: Any) -> None:
    def kept(world: World) -> int:
        engine = made(world, "tp2", theirs.make(64))
        assert engine.split is not None
        originals = engine.split.originals.values()
        trained = {id(param) for param in engine.model.parameters()}  # those that no rank cuts
        params = [param for module in originals for param in module.parameters(recurse=False)]
        params = [param for param in params if id(param) not in trained]
        return max(param.untyped_storage().nbytes() for param in params if param.dim() == 2)

    torch.manual_seed(SEED)
    whole = 64 * 64 * 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two threads draw from one generator
        assert max(threaded(2, kept, plan="tp2")) < whole


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3"])
def test_a_hugging_face_model_starts_as_its_library_has_it(plan: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(**GPT2)
    expected = plain(lambda: transformers.AutoModelForCausalLM.from_config(config))
    size = 1 if plan == "dp1" else 2
    found = threaded(
        size, lambda world: started(world, plan, models.make("hf", config=GPT2)), plan=plan
    )
    values = join([parts for parts, _ in found])
    for name, param in expected.named_parameters():
        assert torch.equal(values[f"model.{name}"], param.detach().flatten()), name


def test_what_a_reset_leaves_unwritten_is_refused() -> None:
    class Lazy(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

    with torch.device("meta"):
        model = nn.Sequential(Lazy(2, 3))
    place_holders(model, torch.float32, torch.device("cpu"))
    initializer = Initializer(model, 0, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"module '0' \(Lazy\) leaves bias without values"):
        initializer.run(lambda param, value: None)


def test_memory_that_nobody_writes_is_refused(theirs: Any) -> None:
    def careless() -> nn.Module:
        model = theirs.make()
        model.scale = nn.Parameter(torch.empty(3))
        return model

    theirs.careless = careless
    with pytest.raises(ModelError, match="Net leaves scale without values"):
        assemble.make_model({"python": f"{theirs.__name__}:careless"}, SEED)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_added_to_a_model_that_makes_its_start_is_initialised_by_name() -> None:
    pytest.importorskip("transformers")
    model = models.make("hf", config=GPT2)
    with torch.device("meta"):
        model.add_module("more", nn.Linear(2, 2))
    place_holders(model, torch.float32, torch.device("cpu"))
    taken: dict[int, Tensor] = {}
    initializer = Initializer(model, SEED, torch.float32, torch.device("cpu"))
    initializer.run(lambda param, value: taken.update({id(param): value}))
    assert {id(param) for param in model.parameters()} == taken.keys()
