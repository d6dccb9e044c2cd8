"""Rules between keys and between sections: one function each, all failures reported at once.

They need no data, no plan and no torch. Rooms that meet the real thing check again, and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from plait.config.data_rules import data_is_right
from plait.config.model import (
    EXPERT_KEYS,
    HuggingFaceConfig,
    LlamaConfig,
    TransformerConfig,
)
from plait.config.sections import Sections
from plait.plan import shares_text

LEAST_SECRET = 2
KRUM_NEIGHBOURS = 3


def _near(size: int, parts: int) -> str:
    below = size // parts * parts
    return f"the nearest are {below} and {below + parts}" if below else f"the least is {parts}"


def heads_divide_the_hidden_size(config: Sections) -> Iterator[str]:
    """Unless `head_dim` says otherwise."""
    model = config.model
    if not isinstance(model, TransformerConfig) or getattr(model, "head_dim", None) is not None:
        return
    if model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size {model.hidden_size} must be a multiple of num_attention_heads "
            f"{model.num_attention_heads}; "
            f"{_near(model.hidden_size, model.num_attention_heads)}"
        )
    elif isinstance(model, LlamaConfig) and (model.hidden_size // model.num_attention_heads) % 2:
        yield (
            f"model.hidden_size {model.hidden_size} over num_attention_heads "
            f"{model.num_attention_heads} is an odd size of a "
            "head; rotary positions turn pairs"
        )


def head_dim_is_even(config: Sections) -> Iterator[str]:
    """Rotary positions turn pairs of features."""
    model = config.model
    if isinstance(model, LlamaConfig) and model.head_dim is not None and model.head_dim % 2:
        yield f"model.head_dim {model.head_dim} is odd; rotary positions turn pairs"


def key_value_heads_divide_the_heads(config: Sections) -> Iterator[str]:
    """Each key-value head serves a whole group of queries."""
    model = config.model
    if (
        isinstance(model, LlamaConfig)
        and model.num_key_value_heads
        and model.num_attention_heads % model.num_key_value_heads
    ):
        yield (
            f"model.num_attention_heads {model.num_attention_heads} must be a multiple of "
            "num_key_value_heads "
            f"{model.num_key_value_heads}; "
            f"{_near(model.num_attention_heads, model.num_key_value_heads)}"
        )


def expert_keys_go_together(config: Sections) -> Iterator[str]:
    """The keys of experts mean nothing without experts, and a token cannot go to more than there
    are.
    """
    model = config.model
    if not isinstance(model, LlamaConfig):
        return
    if model.num_local_experts is None:
        for key in EXPERT_KEYS:
            if getattr(model, key):
                yield (
                    f"model.{key} {getattr(model, key)} needs num_local_experts, the number of "
                    "experts"
                )
    elif (
        model.num_experts_per_tok is not None
        and model.num_experts_per_tok > model.num_local_experts
    ):
        yield (
            f"model.num_experts_per_tok {model.num_experts_per_tok} is more than num_local_experts "
            f"{model.num_local_experts}"
        )


def router_keys_go_together(config: Sections) -> Iterator[str]:
    """Groups cut the experts evenly and hold enough of them; what is balanced by itself needs no
    help.
    """
    model = config.model
    if not isinstance(model, LlamaConfig) or model.num_local_experts is None:
        return
    experts = model.num_local_experts
    groups = model.n_group or 1
    chosen_groups = model.topk_group or 1
    if experts % groups:
        yield (
            f"model.num_local_experts {experts} must be a multiple of n_group {groups}; "
            f"{_near(experts, groups)}"
        )
    elif chosen_groups > groups:
        yield f"model.topk_group {chosen_groups} is more than n_group {groups}"
    elif groups > 1 and (model.num_experts_per_tok or 2) > chosen_groups * (experts // groups):
        yield (
            f"model.topk_group {chosen_groups} groups hold {chosen_groups * (experts // groups)} "
            "experts, fewer than "
            f"num_experts_per_tok {model.num_experts_per_tok or 2}"
        )
    if model.topk_method == "expert_choice" and (
        model.router_aux_loss_coef or model.router_bias_update_speed
    ):
        yield (
            "model.topk_method 'expert_choice' is balanced by itself; leave router_aux_loss_coef "
            "and the bias's speed out"
        )


def hf_config_has_a_type(config: Sections) -> Iterator[str]:
    """An inline table must say which model it is."""
    model = config.model
    if (
        isinstance(model, HuggingFaceConfig)
        and isinstance(model.config, dict)
        and "model_type" not in model.config
    ):
        yield (
            "model.config needs model_type when it is a table, as in config = {model_type = 'gpt2'}"
        )


def optimizer_keys_go_together(config: Sections) -> Iterator[str]:
    """Momentum is SGD's; Nesterov's needs some; a floor lies below."""
    train = config.train
    if train.optimizer == "adamw" and (train.momentum or train.nesterov):
        found = f"momentum {train.momentum:g}" if train.momentum else "nesterov"
        yield f"train.{found} belongs to optimizer 'sgd'; adamw has betas"
    elif train.nesterov and not train.momentum:
        yield "train.nesterov needs momentum above 0"
    for number, group in enumerate(train.groups):
        own_keys = [key for key in ("lr", "weight_decay") if getattr(group, key) is not None]
        where = f"train.groups[{number}] ('{group.match}')"
        if group.freeze and own_keys:
            yield f"{where} is frozen, so {own_keys[0]} says nothing; drop one of them"
        elif own_keys and ":" in train.optimizer:
            yield (
                f"{where} has {own_keys[0]}, but '{train.optimizer}' makes its own groups from "
                "params.named(); only freeze goes with a function"
            )
        elif not own_keys and not group.freeze:
            yield f"{where} changes nothing; give it lr, weight_decay or freeze = true"
    if train.min_lr > train.lr:
        yield f"train.min_lr {train.min_lr:g} is above lr {train.lr:g}"


def federations_have_enough_clients(config: Sections) -> Iterator[str]:
    """A sum of one client hides nothing; krum needs neighbours that are not bad."""
    federated = config.federated
    num_asked = max(1, round(federated.fraction * federated.clients))
    share = f"federated.clients {federated.clients} with fraction {federated.fraction:g}"
    most = federated.clients if federated.noise else num_asked  # noise draws how many are asked
    if federated.min_replies > most:
        yield (
            f"{share} asks at most {most} a round, and federated.min_replies "
            f"{federated.min_replies} would void every round; ask for {most} or fewer"
        )
    if federated.secure and num_asked < LEAST_SECRET:
        yield (
            f"{share} asks {num_asked} a round, and federated.secure hides nothing in the sum of "
            "one client; "
            f"ask {LEAST_SECRET} or more"
        )
    if federated.strategy == "krum" and num_asked < federated.num_bad + KRUM_NEIGHBOURS:
        yield (
            f"{share} asks {num_asked} a round, too few for krum with num_bad {federated.num_bad}: "
            "it needs "
            f"num_bad + {KRUM_NEIGHBOURS} = {federated.num_bad + KRUM_NEIGHBOURS} or more"
        )


def adapters_have_a_kind(config: Sections) -> Iterator[str]:
    """Without a kind the whole model would be trained, and the other keys mean nothing."""
    adapter = config.adapter
    if adapter.kind is not None:
        return
    for key, field in type(adapter).model_fields.items():
        if getattr(adapter, key) != field.default:
            yield f"adapter.{key} {getattr(adapter, key)!r} needs adapter.kind, 'lora' or 'dora'"


def restarts_are_of_one_kind(config: Sections) -> Iterator[str]:
    """Ranks that go on by themselves, and ranks that go back together, are two ways to recover."""
    asynchronous = config.train.restarts
    together = config.recovery.restarts
    if asynchronous and together:
        yield (
            f"train.restarts {asynchronous} and recovery.restarts {together} exclude each other; "
            "keep train.restarts for 'local' and 'async-server', recovery.restarts for other plans"
        )
    if asynchronous and config.eval is not None and config.eval.every:
        yield (
            f"train.restarts {asynchronous} and eval.every {config.eval.every} exclude each other: "
            "a rank that comes back cannot join an evaluation; evaluate afterwards, with "
            "'plait evaluate RUN_DIR'"
        )


def new_plans_are_named(config: Sections) -> Iterator[str]:
    """A word that is not known is a plan outside of a list, or a slip of the pen."""
    replan = config.recovery.replan
    if replan in ("auto", "never") or (replan and not isinstance(replan, str)):
        return
    shown = repr(replan) if replan else "[]"
    yield (
        f"recovery.replan {shown} is neither 'auto' nor 'never' nor a list of plans, as in "
        "replan = ['dp2', 'dp1']"
    )


def shares_weigh_every_sample_alike(config: Sections) -> Iterator[str]:
    """A mean of workers' means would weigh the samples of a small share more."""
    shares = config.plan.shares
    if not shares or len(set(shares)) == 1:
        return
    setting = f"plan.shares {shares_text(shares)}"
    if config.train.aggregate == "mean":
        yield (
            f"{setting} and train.aggregate 'mean' exclude each other: the mean weighs workers "
            "alike; take aggregate 'sum', or leave shares out"
        )
    if config.train.fixed_order:
        yield (
            f"{setting} and train.fixed_order exclude each other: its tree is of equal parts; "
            "leave one of them out"
        )


RULES: Final[tuple[Callable[[Sections], Iterator[str]], ...]] = (
    heads_divide_the_hidden_size,
    head_dim_is_even,
    key_value_heads_divide_the_heads,
    expert_keys_go_together,
    router_keys_go_together,
    hf_config_has_a_type,
    data_is_right,
    optimizer_keys_go_together,
    federations_have_enough_clients,
    adapters_have_a_kind,
    restarts_are_of_one_kind,
    new_plans_are_named,
    shares_weigh_every_sample_alike,
)


def broken_rules(config: Sections) -> list[str]:
    """The messages of all rules that a config breaks."""
    return [message for rule in RULES for message in rule(config)]
