"""Optimizers and courses of the learning rate, by the names that frameworks give them."""

from __future__ import annotations

from typing import Final

from plait.interop.draft import Draft
from plait.interop.source import Source
from plait.values import JsonValue

ADAM: Final = frozenset(
    {"adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "adamw_torch", "adamw_hf"}
    | {"adamw_torch_fused", "adamw_apex_fused", "adamwscheduled", "distributedfusedadam"}
)
SGD: Final = frozenset({"sgd", "torch_sgd"})
MUON: Final = frozenset({"muon"})
SAME_RULE: Final = {
    "adamw_bnb_8bit": "8-bit states there; plait keeps them in float32",
    "adamw_8bit": "8-bit states there; plait keeps them in float32",
    "paged_adamw_8bit": "8-bit paged states there; plait keeps them in float32",
    "paged_adamw_32bit": "paged states there; plait's stay where the plan puts them",
    "onebitadam": "1-bit messages after a warm-up there; plait sends whole gradients",
    "zerooneadam": "compressed messages there; plait sends whole gradients",
}
"""Optimizers with AdamW's rule, whose states or messages are rounded."""

COURSES: Final = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmuplr": "constant",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def adopt_name(source: Source, draft: Draft, key: str, name: JsonValue) -> None:
    """The optimizer that a name means; another is named as unmapped and AdamW is taken."""
    if name is None:
        return
    word = str(name).strip().lower()
    if word in ADAM:
        draft.put("train", optimizer="adamw")
    elif word in SGD:
        draft.put("train", optimizer="sgd")
    elif word in MUON:
        draft.put("train", optimizer="muon")
    elif word in SAME_RULE:
        draft.put("train", optimizer="adamw")
        source.note(key, "different", SAME_RULE[word])
    else:
        source.note(
            key,
            "ignored",
            "no optimizer of plait; give yours by train.optimizer = 'module:function'",
        )


def adopt_optimizer(source: Source, draft: Draft, name_key: str, params: str) -> None:
    """An optimizer as {type, params}, torch's names inside."""
    name = source.take(name_key)
    adopt_name(source, draft, name_key, name)
    betas = source.take(f"{params}.betas")
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        draft.put("train", betas=[float(betas[0]), float(betas[1])])
    draft.put(
        "train",
        lr=source.number(f"{params}.lr", f"{params}.learning_rate"),
        eps=source.number(f"{params}.eps"),
        weight_decay=source.number(f"{params}.weight_decay"),
        momentum=source.number(f"{params}.momentum"),
    )
    if f"{params}.nesterov" in source:
        draft.put("train", nesterov=source.flag(f"{params}.nesterov"))
    decoupled = f"{params}.adam_w_mode"
    if decoupled in source and not source.flag(decoupled):
        source.note(
            decoupled, "different", "weight decay joins the gradient there; here it is AdamW's"
        )
    if str(name).lower() == "adam" and decoupled not in source:
        source.note(
            name_key,
            "different",
            "DeepSpeed's Adam decouples weight decay unless adam_w_mode says no; so does plait's",
        )
    for key in [key for key in source.left() if key.startswith(f"{params}.")]:
        source.note(key, "ignored", "a setting of that optimizer's implementation")


def adopt_schedule(source: Source, draft: Draft, name_key: str, params: str) -> None:
    """A course of the learning rate as {type, params}, with DeepSpeed's names inside."""
    name = source.take(name_key)
    adopt_course(source, draft, name_key, name)
    draft.put(
        "train",
        warmup_steps=source.count(f"{params}.warmup_num_steps"),
        steps=source.count(f"{params}.total_num_steps"),
    )
    peak = source.number(f"{params}.warmup_max_lr")
    if peak is not None and "lr" not in draft.sections["train"]:
        draft.put("train", lr=peak)
    least = source.number(f"{params}.warmup_min_lr")
    if least:
        source.note(
            f"{params}.warmup_min_lr", "different", "plait's warm-up starts from lr / steps"
        )
    if source.take(f"{params}.warmup_type") in (None, "log") and name is not None:
        key = f"{params}.warmup_type" if f"{params}.warmup_type" in source else name_key
        source.note(key, "different", "the warm-up is logarithmic there, linear in plait")
    for key in [key for key in source.left() if key.startswith(f"{params}.")]:
        source.note(key, "ignored", "plait's courses are constant, linear and cosine")


def adopt_course(source: Source, draft: Draft, key: str, name: JsonValue) -> None:
    """The course that a name means; another is named as unmapped."""
    if name is None:
        return
    course = COURSES.get(str(name).strip().lower())
    if course is None:
        source.note(key, "ignored", "plait's courses are constant, linear and cosine")
        return
    draft.put("train", schedule=course)
