"""The parity harness: the engine under a plan, on real ranks, against one device in plain
PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.init import Initializer, derive_seed, place_holders
from plait.mesh import Mesh
from plait.models import losses
from plait.plan import Plan
from plait.verify.compare import largest, relative_error
from plait.verify.observation import Record
from plait.verify.reference import Recipe, Slice, run_reference
from plait.verify.run import _nudged as nudged
from tests.parity.generator import odd

TOLERANCE = 1e-10  # float64, relative (plait.verify.compare says to what); never relaxed
SEED = 5
STEPS = 3


@dataclass(frozen=True)
class Family:
    """A model family: its factory keys, its loss, its data, and whether samples of a slice see each
    other.
    """

    name: str
    keys: dict[str, Any]
    sample: tuple[int, ...]
    classes: int
    tokens: bool = False
    by_slice: bool = False
    by_micro_batch: bool = False  # a loss of its own, of all slices of a micro-batch together
    frozen: tuple[str, ...] = ()  # patterns of parameters that do not train
    num_steps: int = STEPS

    def model(self) -> nn.Module:
        """On the meta device."""
        make = odd.Odd if self.name == "odd" else functools.partial(models.make, self.name)
        with torch.device("meta"):
            model: nn.Module = make(**self.keys)
        for name, param in model.named_parameters():
            param.requires_grad_(not any(models.match(pattern, name) for pattern in self.frozen))
        return model

    def batches(self, num_samples: int) -> list[tuple[Tensor, Tensor]]:
        """The same global batches in every process; some targets are masked, unevenly, where
        targets are tokens.
        """
        generator = torch.Generator().manual_seed(7)
        return [self._batch(num_samples, generator) for _ in range(self.num_steps)]

    def _batch(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if not self.tokens:
            inputs = torch.randn(
                num_samples, *self.sample, generator=generator, dtype=torch.float64
            )
            return inputs, torch.randint(0, self.classes, (num_samples,), generator=generator)
        tokens = torch.randint(
            0, self.classes, (num_samples, self.sample[0] + 1), generator=generator
        )
        targets = tokens[:, 1:].clone()
        share = torch.linspace(0, 0.9, num_samples)[:, None]
        targets[torch.rand(targets.shape, generator=generator) < share] = -100
        return tokens[:, :-1], targets


RESNET = {"depth": 18, "num_classes": 7, "in_channels": 2, "width": 4}

FAMILIES = {
    "mlp": Family(
        "mlp",
        {"in_features": 6, "hidden_size": 11, "num_hidden_layers": 2, "out_features": 5},
        (6,),
        5,
    ),
    "gpt": Family(
        "gpt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "vocab_size": 29,
            "max_position_embeddings": 12,
            "tie_word_embeddings": True,
        },
        (9,),
        29,
        tokens=True,
    ),
    "llama": Family(
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 22,
            "vocab_size": 31,
            "max_position_embeddings": 12,
        },
        (7,),
        31,
        tokens=True,
    ),
    "resnet": Family("resnet", RESNET, (2, 16, 16), 7),
    # Statistics of batch-norm are those of a micro-batch on a rank, as in torch DDP: one device
    # takes the same slices.
    # The images are large enough for four elements a statistic: over one or two, batch-norm divides
    # rounding by almost nothing.
    "resnet-batch": Family(
        "resnet", {**RESNET, "norm": "batch", "width": 2}, (2, 64, 64), 7, by_slice=True
    ),
}


# Sizes that grids of 2 x 2 and 2 x 2 x 2 divide, and 1D over 2 and 4. Batch (12), sequence, hidden,
# heads and vocabulary
# all differ.
SPLIT_FAMILIES = {
    "mlp": Family(
        "mlp",
        {"in_features": 20, "hidden_size": 16, "num_hidden_layers": 4, "out_features": 5},
        (20,),
        5,
    ),
    "gpt": Family(
        "gpt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "vocab_size": 44,
            "max_position_embeddings": 17,
            "tie_word_embeddings": True,
        },
        (8,),
        44,
        tokens=True,
    ),
    "llama": Family(
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "intermediate_size": 36,
            "vocab_size": 28,
            "max_position_embeddings": 32,
        },
        (16,),
        28,
        tokens=True,
    ),
}


TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "vocab_size": 28,
    "intermediate_size": 36,
    "max_position_embeddings": 32,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "vocab_size": 44,
    "n_positions": 17,
    "n_inner": 40,
}
GPT2 |= {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HUGGING_FACE = {
    "hf-llama": {
        **TINY,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
    },
    "hf-gpt2": GPT2,
    "hf-qwen2": {
        **TINY,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 3,
    },
}
SPLIT_FAMILIES |= {
    name: Family("hf", {"config": config}, (8,), int(str(config["vocab_size"])), tokens=True)
    for name, config in HUGGING_FACE.items()
}


# Its masks depend on the slice, so one device takes the same slices.
DROPPED = {
    "split-gpt-dropout": Family(
        "gpt", {**SPLIT_FAMILIES["gpt"].keys, "dropout": 0.3}, (8,), 44, tokens=True, by_slice=True
    )
}

# Enough layers for eight stages, and small ones: what pipelines are proven on.
DEEP = {
    "mlp-deep": Family("mlp", {**FAMILIES["mlp"].keys, "num_hidden_layers": 7}, (6,), 5),
    "gpt-deep": Family(
        "gpt",
        {**FAMILIES["gpt"].keys, "num_hidden_layers": 4, "hidden_size": 8},
        (9,),
        29,
        tokens=True,
    ),
    "llama-deep": Family(
        "llama",
        {**FAMILIES["llama"].keys, "num_hidden_layers": 5, "hidden_size": 8},
        (7,),
        31,
        tokens=True,
    ),
    "resnet": FAMILIES["resnet"],
}


# A sequence that 2 and 4 ranks cut in zig-zag order, heads and experts that 4 ranks share.
LONG = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 32,
    "max_position_embeddings": 16,
}
MIXTRAL = {**LONG, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **LONG,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced": {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.02},
    "by-sequence": {
        "router_aux_loss_coef": 0.1,
        "seq_aux": True,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
    },
    "bias": {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "router_bias_update_speed": 0.05,
    },
    "groups": {"n_group": 2, "topk_group": 1, "router_aux_loss_coef": 0.05},
    "drop": {"capacity_factor": 0.6, "router_aux_loss_coef": 0.05},
    "drop-position": {"capacity_factor": 0.9, "drop_policy": "position"},
    "noisy": {"topk_method": "noisy", "router_aux_loss_coef": 0.1, "seq_aux": True},
    "expert-choice": {"topk_method": "expert_choice", "router_z_loss_coef": 0.02},
}


def _experts(kind: str, base: dict[str, Any], router: str) -> Family:
    keys = {**base, **ROUTERS[router]}
    if kind == "deepseek" and "n_group" in keys:
        keys["topk_group"] = 1
    random = router == "noisy"
    return Family("llama", keys, (8,), 32, tokens=True, by_slice=random, by_micro_batch=not random)


EXPERT_FAMILIES = {
    f"{kind}-{router}": _experts(kind, base, router)
    for kind, base in (("mixtral", MIXTRAL), ("deepseek", DEEPSEEK))
    for router in ROUTERS
}
LONG_FAMILIES = {
    "long-llama": Family("llama", LONG, (16,), 32, tokens=True),
    "long-gpt": Family(
        "gpt", {k: v for k, v in LONG.items() if k != "num_key_value_heads"}, (16,), 32, tokens=True
    ),
}


@dataclass
class Outcome:
    """Largest relative errors of one plan, and the name of the worst tensor."""

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    norm: float = 0.0
    worst: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str, error: float) -> None:
        if not error <= getattr(self, kind):
            setattr(self, kind, error)
            self.worst[kind] = name

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad, self.param, self.norm)


def family_of(name: str | Family) -> Family:
    """A family by its name in any table; those of `SPLIT_FAMILIES` are called split-NAME. A family
    is itself.
    """
    if isinstance(name, Family):
        return name
    if name.startswith("hf-"):
        from tests.parity.hugging_face import HUGGING_FACE

        return HUGGING_FACE[name]
    if name.startswith(("more-", "wide-", "three-")):
        from tests.parity.wide import WIDE

        return WIDE[name]
    return {
        **DEEP,
        **DROPPED,
        **FAMILIES,
        **EXPERT_FAMILIES,
        **LONG_FAMILIES,
        **{f"split-{key}": family for key, family in SPLIT_FAMILIES.items()},
    }[name]


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-6)


def check(
    run: Callable[..., list[Any]],
    plan_text: str,
    family: str | Family,
    num_samples: int = 12,
    **options: Any,
) -> Outcome:
    """Run one cell of the parity table; `run` is the `ranks` fixture. `node` is the number of ranks
    of a node.
    """
    plan = Plan.parse(plan_text)
    mesh = replace(Mesh.of(plan), node=options.pop("node", 0))
    results = run(plan.world_size, run_engine, plan_text, family, num_samples, options, plan=mesh)
    return compare(
        results, reference(family, plan, num_samples, options), options.get("clip_grad_norm")
    )


def run_engine(
    world: World,
    plan_text: str,
    family_name: str | Family,
    num_samples: int,
    options: dict[str, Any],
) -> list[Any]:
    """Train the family's steps on this rank; every rank returns its parts, the test joins them."""
    family = family_of(family_name)
    return train(make_engine(world, plan_text, family, options), family, num_samples)


def make_engine(
    world: World,
    plan_text: str,
    family: Family,
    options: dict[str, Any],
    model: nn.Module | None = None,
) -> Engine:
    """The engine of this rank, of the family's model or one that is given."""
    return build(
        model or family.model(),
        Plan.parse(plan_text),
        loss=losses.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, **options),
        world=world,
    )


def train(engine: Engine, family: Family, num_samples: int) -> list[Any]:
    """(loss, norm, gradients, parameters) after every step, as this rank has them."""
    axis = engine.world.axis("dp")
    seen = []
    grads: list[Any] = []
    engine.before_update.append(lambda e: grads.append(e.local_gradients()))
    for inputs, targets in family.batches(num_samples):
        batch = (
            inputs.tensor_split(axis.size)[axis.rank],
            targets.tensor_split(axis.size)[axis.rank],
        )
        result = engine.step(batch, trace=False)
        seen.append((result.loss, result.grad_norm, grads.pop(), engine.local_parameters()))
        seen[-1] = (*seen[-1][:2], *(_copies(parts) for parts in seen[-1][2:]))
    return seen


def _copies(parts: list[Any]) -> list[tuple[str, tuple[int, ...], slice | Tensor, Tensor]]:
    return [(part.name, part.global_shape, part.index(), part.value.clone()) for part in parts]


def join(parts_by_rank: list[Any]) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks. Parts that overlap must agree to the last bit."""
    whole: dict[str, Tensor] = {}
    for parts in parts_by_rank:
        for name, shape, index, value in parts:
            flat = whole.setdefault(
                name, torch.full((torch.Size(shape).numel(),), float("nan"), dtype=value.dtype)
            )
            there = flat[index]
            known = ~there.isnan()
            assert torch.equal(there[known], value[known]), f"ranks differ in {name}"
            flat[index] = value
    return whole


def whole_model(family: Family) -> nn.Module:
    """On one device, with the values that engines begin with."""
    model = family.model()
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, SEED, torch.float64, torch.device("cpu")).run(take)
    return model


_REFERENCES: dict[Any, Record] = {}


def reference(
    family_name: str | Family,
    plan: Plan,
    num_samples: int,
    options: dict[str, Any],
    *,
    aside: bool = False,
) -> Record:
    """One device, plain PyTorch; remembered, as many plans share it. `aside`: started about one bit
    away.
    """
    family = family_of(family_name)
    by_micro_batch = family.by_micro_batch and plan.micro_batches > 1
    cut = (plan.dp.size, plan.micro_batches) if family.by_slice or by_micro_batch else None
    key = (repr(family_name), cut, num_samples, options.get("clip_grad_norm"), aside)
    if key not in _REFERENCES:
        model = whole_model(family)
        model = nudged(model) if aside else model
        recipe = Recipe(
            losses.cross_entropy, optimizer, clip_grad_norm=options.get("clip_grad_norm")
        )

        def slices(step: int, batch: tuple[Tensor, Tensor]) -> list[Slice]:
            return [
                Slice(
                    rank,
                    micro,
                    (x, y),
                    derive_seed(SEED, "step", step, rank * plan.micro_batches + micro),
                )
                for rank, (bx, by) in enumerate(
                    zip(*(t.tensor_split(plan.dp.size) for t in batch), strict=True)
                )
                for micro, (x, y) in enumerate(
                    zip(*(t.tensor_split(plan.micro_batches) for t in (bx, by)), strict=True)
                )
            ]

        batches = family.batches(num_samples)
        how = {"by_slice": family.by_slice, "by_micro_batch": by_micro_batch}
        _REFERENCES[key] = run_reference(model, batches, recipe, slices, **how)
    return _REFERENCES[key]


def compare(results: list[Any], record: Record, clip_grad_norm: float | None = None) -> Outcome:
    """The engine's ranks against the reference, step by step. (The reference keeps gradients as
    clipped.)
    """
    outcome = Outcome()
    for step, expected in enumerate(record.steps):
        by_rank = [rank[step] for rank in results]
        clipped = (
            1.0
            if clip_grad_norm is None
            else min(1.0, clip_grad_norm / (expected.grad_norm + 1e-6))
        )
        for loss, norm, _, _ in by_rank:
            outcome.note("loss", f"step {step}", abs(loss - expected.loss) / abs(expected.loss))
            outcome.note(
                "norm", f"step {step}", abs(norm - expected.grad_norm) / expected.grad_norm
            )
        params = join([rank[3] for rank in by_rank])
        grads = join([rank[2] for rank in by_rank])
        assert params.keys() == expected.params.keys()
        for name, value in expected.params.items():
            outcome.note(
                "param",
                name,
                relative_error(params[name].view_as(value), value, largest(expected.params)),
            )
        for name, value in expected.grads.items():
            assert (value is None) == (name not in grads), name
            if value is not None:
                grad = grads[name].view_as(value) * clipped
                outcome.note("grad", name, relative_error(grad, value, largest(expected.grads)))
    return outcome
