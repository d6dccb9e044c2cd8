"""Calls of a loop as inputs, targets and a loss that the last stage of a pipeline takes.

A loop gives labels to the model, and reads a loss from its output. An engine gives the model its
inputs and the loss its targets: they are on different ranks of a pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.loss import LossFunction
from plait.errors import DataError, ModelError
from plait.models.hf import Encoder, HuggingFace, Pictures
from plait.models.losses import IGNORE, cross_entropy
from plait.values import PyTree

CAUSAL: Final = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
MASKED: Final = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
IMAGE: Final = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"

WRAPPERS: Final[Mapping[str, type[HuggingFace]]] = {
    CAUSAL: HuggingFace,
    MASKED: Encoder,
    IMAGE: Pictures,
}

LossOfLoop = Callable[..., Tensor]
"""A loss of `transformers`: (outputs, labels, num_items_in_batch) -> a sum over that number."""

LossOfScript = Callable[..., PyTree]
"""A loss that a script gives: a `LossOfLoop`, or (output, targets) -> (sum, count) or a mean."""


class Calls(ABC):
    """The calls of one model.

    Attributes:
        model: the model that an engine trains.
        loss: its loss.
    """

    model: nn.Module
    loss: LossFunction

    @abstractmethod
    def batch(self, args: tuple[PyTree, ...], named: Mapping[str, PyTree]) -> PyTree:
        """The batch (inputs, targets) of a call."""


class LossCalls(Calls):
    """Calls `model(inputs, targets)` of any model, whose loss is given."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self.model = model
        self.loss = loss

    def batch(self, args: tuple[PyTree, ...], named: Mapping[str, PyTree]) -> PyTree:
        if len(args) == 2 and not named:
            return args
        if len(args) == 1 and isinstance(args[0], Mapping):
            return args[0]
        if named and not args:
            return dict(named)
        raise DataError(
            f"the model was called with {len(args)} arguments and the names "
            f"{sorted(named)}; call model(inputs, targets) or model(**batch), so that the loss "
            "is computed with the model"
        )


class LibraryCalls(Calls):
    """Calls of a model of `transformers` with `labels`."""

    def __init__(self, model: nn.Module, loss: LossOfLoop | None = None) -> None:
        """Take a model of the library, and a loss of `Trainer`'s form in place of its own."""
        self._task = task_of(model)
        check_routers(model)
        self.model = WRAPPERS[self._task](model)
        self.loss = cross_entropy if loss is None else _counted(loss)
        self._shifts = self._task == CAUSAL and loss is None

    def batch(self, args: tuple[PyTree, ...], named: Mapping[str, PyTree]) -> PyTree:
        if args:
            raise DataError(
                "the model was called with arguments that have no name; call model(**batch) with "
                "labels in the batch, as its loss needs them"
            )
        batch = dict(named)
        labels = batch.pop("labels", None)
        if labels is None:
            raise DataError(
                "the batch has no labels, and a loss outside the model cannot be computed on the "
                f"stages of a pipeline; its keys are {sorted(named)}"
            )
        self._check_mask(batch.pop("attention_mask", None))
        for key in ("num_items_in_batch", "return_dict", "use_cache"):
            batch.pop(key, None)
        main = "pixel_values" if self._task == IMAGE else "input_ids"
        unknown = sorted(batch.keys() - {main})
        if unknown or main not in batch:
            raise DataError(
                f"the model takes {main}, attention_mask and labels under a plan, and not "
                f"{', '.join(unknown) or 'a batch without them'}; leave them out of the batch"
            )
        return batch[main], next_tokens(labels) if self._shifts else labels

    def _check_mask(self, mask: Tensor | None) -> None:
        """Refuse a mask that changes what the model computes: padding behind causal tokens is seen
        by no token that counts.
        """
        if mask is None:
            return
        if self._task == CAUSAL and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            return
        if self._task != CAUSAL and bool(mask.all()):
            return
        where = "the left" if self._task == CAUSAL else "any side"
        raise DataError(
            f"attention_mask has padding on {where}, and masks do not travel through stages and "
            "tensor axes; pad on the right for a causal model, or give sequences of one length"
        )


def calls_of(model: nn.Module, loss: LossOfScript | None = None) -> Calls:
    """The calls of a model: of `transformers`, or any other with its loss.

    Raises:
        ModelError: a model that does not compute its loss, without a loss function.
    """
    if _is_of_library(model):
        return LibraryCalls(model, loss)
    if loss is None:
        raise ModelError(
            f"{type(model).__name__} is not a model of transformers that computes its own loss, "
            "and the script cannot compute it, because only the last stage has outputs; give "
            "loss=function of (output, targets), and call model(inputs, targets)"
        )
    return LossCalls(model, loss)


def next_tokens(labels: Tensor) -> Tensor:
    """Labels [B, S] aligned with the outputs that guess them."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def task_of(model: nn.Module) -> str:
    """The table of the library that names the model's class. Raises `ModelError` for others."""
    from transformers.models.auto import modeling_auto

    name = type(model).__name__
    for table in WRAPPERS:
        if name in getattr(modeling_auto, table).values():
            return table
    raise ModelError(
        f"{name} is no causal, masked or image model of transformers, and its loss is not known "
        "outside it; train it with plait.build and a loss function"
    )


def check_routers(model: nn.Module) -> None:
    """Refuse a model whose loss has a part that is computed outside its layers.

    Raises:
        ModelError: the loss has a part of all routers' logits.
    """
    config: PyTree = model.config
    if getattr(getattr(config, "text_config", config), "output_router_logits", False):
        raise ModelError(
            f"{type(model).__name__} has output_router_logits = True, so its loss has a part of "
            "all routers' logits, which are on no one rank; set it to False (in TRL: "
            "SFTConfig(router_aux_loss_coef=0.0))"
        )


def _is_of_library(model: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def _counted(loss: LossOfLoop) -> LossFunction:
    """A loss of `Trainer` as a sum and a count of labels."""

    def summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        from transformers.modeling_outputs import CausalLMOutput

        count = (labels[..., 1:] if labels.dim() > 1 else labels).ne(IGNORE).sum()
        one: PyTree = count.clamp(min=1)
        outputs = CausalLMOutput(logits=logits)
        return loss(outputs, labels, num_items_in_batch=one) * one, count

    return summed
