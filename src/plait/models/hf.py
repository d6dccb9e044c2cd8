"""Models of Hugging Face `transformers`, as they are, on the meta device.

Only their edges are changed. The forward takes token numbers or pictures and gives logits, without
caches or wrappers around them. Every module that owns tensors gets a `reset_parameters`, their
library's own initialisation of that one module. It leaves out work on grandchildren, such as
GPT-2's smaller residual projections.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.errors import ModelError, nearest
from plait.models import hf_experts
from plait.models.hf_alone import from_config
from plait.models.hf_conversion import converted
from plait.models.hf_masks import in_one_piece, masks_of
from plait.models.hf_roles import roles_for
from plait.models.layers import RMSNorm, ScaledEmbedding
from plait.models.routing import Router
from plait.models.weights import MakeStart, Weights, fit, open_folder, wholly_on_meta
from plait.torch_internals import without_talk_of_kernels
from plait.values import JsonMapping, JsonObject, PyTree

OWN = (
    RMSNorm,
    Router,
    hf_experts.FusedExperts,
)  # modules of this project, in the place of the library's
OLD_BUFFERS = (
    r"attn\.(masked_)?bias$",
    r"rotary_emb\.inv_freq$",
)  # that earlier versions of the library saved


__all__ = ["HuggingFace", "files_of", "library", "make", "roles_for", "vocabulary"]

GENERATION = "generation_config.json"


TASKS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
}
"""The library's door for each task."""


class HuggingFace(nn.Module):
    """Token numbers [B, S] -> logits [B, S, V] of `self.model`, whose parameter names are those of
    the library.
    """

    gives_positions = True
    """Whether the library's model gets positions, which it then does not make itself."""

    def __init__(
        self,
        model: nn.Module,
        *,
        generation: JsonObject | None = None,
        make_start: MakeStart | None = None,
    ) -> None:
        """Wrap the library's model.

        `generation` is the library's config of it. `make_start` makes its values, where no files
        have them.
        """
        super().__init__()
        self.model = model
        self.weights: Weights | None = None
        self.generation = generation
        self.make_start = make_start
        _replace_own(model)
        hf_experts.adopt(model)
        _let_experts_take_float64(model)
        initialise: Any = model._init_weights
        for module in model.modules():
            if (module._parameters or module._buffers) and not isinstance(module, OWN):
                module.reset_parameters = partial(initialise, module)  # type: ignore[assignment]

    def read_from(self, weights: Weights) -> None:
        """Take the values from files."""
        self.weights = weights

    def forward(
        self,
        input_ids: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Token numbers [B, S] -> logits [B, S, V]. No cache, and the mask of the library's own:
        causal, nothing padded.

        `documents` [B, S]: of packed sequences, the number of the document of each token; none sees
        another. `positions` [B, S]: the place of each token in its document.
        """
        whole = in_one_piece() if positions is None else nullcontext()
        if positions is None:  # said, as embeddings may be in parts
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        config: Any = self.model.config
        masks = masks_of(config, input_ids, next(self.parameters()).dtype, documents)
        with whole:
            return self._logits(
                input_ids=input_ids, position_ids=positions, attention_mask=masks, use_cache=False
            )

    def _logits(self, **inputs: object) -> Tensor:
        """The logits of the library's model; inputs that its forward does not know are left out."""
        known = inspect.signature(self.model.forward).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            inputs = {key: value for key, value in inputs.items() if key in known}
        logits: Tensor = self.model(**inputs).logits
        return logits


class EncoderDecoder(HuggingFace):
    """Token numbers [B, S] of the source, and [B, T] of the target -> logits [B, T, V]."""

    gives_positions = False

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        """Source [B, S], target [B, T] -> logits [B, T, V]. Without a target, the decoder reads the
        source.
        """
        target = input_ids if decoder_input_ids is None else decoder_input_ids
        return self._logits(input_ids=input_ids, decoder_input_ids=target, use_cache=False)


class Encoder(HuggingFace):
    """Token numbers [B, S] -> logits [B, S, V] of a masked language model."""

    gives_positions = False

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """[B, S] -> logits [B, S, V]. Every position sees every other: nothing is padded."""
        return self._logits(input_ids=input_ids)


class Pictures(HuggingFace):
    """Pictures [B, channels, height, width] -> logits [B, classes]."""

    gives_positions = False

    def forward(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]
        """[B, channels, height, width] -> [B, classes]: the library's model, without the wrapper
        around its logits.
        """
        return self._logits(pixel_values=pixel_values)


WRAPPERS = {
    "causal": HuggingFace,
    "masked": Encoder,
    "seq2seq": EncoderDecoder,
    "image": Pictures,
}


def _let_experts_take_float64(model: nn.Module) -> None:
    """The library multiplies experts by torch's grouped product, which has no float64; its loop
    over experts has.
    """

    def choose(module: Any, args: tuple[PyTree, ...]) -> None:
        if args[0].dtype == torch.float64:
            module.config._experts_implementation = "eager"

    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "config"):
            module.register_forward_pre_hook(choose)


def make(
    config: str | Path | JsonMapping,
    weights: str | Path | None = None,
    task: str = "causal",
) -> HuggingFace:
    """The model of a config: the path of a `config.json` (or of its directory), or its table with
    `model_type`.

    On the meta device. `task` is one of `TASKS`, by default a causal language model. With
    `weights`, a directory of safetensors files, it knows its start values. Each rank of an engine
    reads those that it keeps. Raises `ModelError` without `transformers`, and for a config or
    weights that do not fit.
    """
    if task not in TASKS:
        raise ModelError(f"task = {task!r} is none of a model 'hf'; {nearest(task, TASKS)}")
    transformers = library()
    table = read_config(config)
    model_type = table.pop("model_type", None)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        raise ModelError(
            f"model_type = {model_type!r} is not one that transformers knows; "
            f"{nearest(str(model_type), known)}"
        )
    try:
        with torch.device("meta"):
            settings = transformers.AutoConfig.for_model(model_type, **table)
            model = wholly_on_meta(from_config(getattr(transformers, TASKS[task]), settings))
    except Exception as failure:
        raise ModelError(
            f"transformers cannot make a {task} model of model_type {model_type!r}: {failure}"
        ) from failure
    generation = _generation_of([folder for folder in (config, weights) if is_path(folder)])
    if weights is None:
        start = partial(_make_whole, settings, task)
        return WRAPPERS[task](model.train(), generation=generation, make_start=start)
    wrapped = WRAPPERS[task](model.train(), generation=generation)
    wrapped.read_from(find_weights(wrapped, Path(weights)))
    return wrapped


def is_path(value: PyTree) -> bool:
    """Whether a key of the config is a path and no table."""
    return isinstance(value, (str, Path))


def _generation_of(sources: list[PyTree]) -> JsonObject | None:
    """The `generation_config.json` beside the config, or else beside the weights."""
    for source in sources:
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        if (folder / GENERATION).is_file():
            return read_config(folder / GENERATION)
    return None


def files_of(made: HuggingFace) -> JsonObject:
    """The small files that `from_pretrained` reads beside the weights: their names and tables."""
    inner: Any = made.model
    config = json.loads(inner.config.to_json_string(use_diff=True))
    files = {"config.json": {**config, "architectures": [type(inner).__name__]}}
    if made.generation is not None:
        files[GENERATION] = made.generation
    return files


def _make_whole(settings: Any, task: str) -> HuggingFace:
    """The model of a config with the values that the library gives it."""
    made = from_config(getattr(library(), TASKS[task]), copy.deepcopy(settings))
    return WRAPPERS[task](made.train())


def _replace_own(model: nn.Module) -> None:
    """Put modules of this project in place of the library's own of equal meaning. Strategies know
    what they do.

    RMS norms then compute in float64 where the library's always round to float32; embeddings that
    scale say by how much.
    """
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if (
                type(module).__name__.endswith("RMSNorm")
                and not isinstance(module, nn.RMSNorm)
                and eps is not None
            ):
                offset = _offset(module, float(eps))
                if offset is not None:
                    weight = cast("nn.Parameter", module.weight)
                    setattr(parent, name, RMSNorm(weight, float(eps), offset))
            scale = getattr(module, "scalar_embed_scale", None)
            if (
                type(module).__name__.endswith("ScaledWordEmbedding")
                and isinstance(module, nn.Embedding)
                and scale is not None
            ):
                weight = cast("nn.Parameter", module.weight)
                setattr(parent, name, ScaledEmbedding(weight, module.padding_idx, _float32(scale)))


def _float32(number: float) -> float:
    """The configuration as the library keeps it."""
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _offset(module: nn.Module, eps: float) -> float | None:
    """The offset that a norm adds to its weight, found by trying it on a few numbers.

    None for a norm of another kind.
    """
    tried = copy.deepcopy(module).to_empty(device="cpu").float()
    weight = tried._parameters.get("weight")
    if weight is None or len(tried._parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        weight.copy_(torch.rand(weight.shape, generator=generator))
        x = torch.randn(3, *weight.shape, generator=generator)
        for offset in (0.0, 1.0):
            if torch.allclose(tried(x), RMSNorm(weight, eps, offset)(x), rtol=1e-5, atol=1e-6):
                return offset
    return None


def find_weights(model: HuggingFace, directory: Path) -> Weights:
    """Where the safetensors files of a directory hold the parameters of a meta model, by their
    names in it.

    Raises `ModelError` for files that cannot be read or do not fit. A tensor may be missing,
    unexpected or of another shape.
    """
    inner: Any = model.model
    stored_by_name = converted(inner, open_folder(directory))
    prefix = f"{inner.base_model_prefix}."
    is_whole = any(name.startswith(prefix) for name in stored_by_name)
    if not is_whole and hasattr(inner, inner.base_model_prefix):  # of the base, without the head
        stored_by_name = {f"{prefix}{name}": stored for name, stored in stored_by_name.items()}
    patterns = [*(inner._keys_to_ignore_on_load_unexpected or ()), *OLD_BUFFERS]
    named = {
        name
        for name, _ in (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers())
    }

    def is_ignored(name: str) -> bool:
        return name in named or any(re.search(pattern, name) for pattern in patterns)

    ignored = list(filter(is_ignored, stored_by_name))
    fitting = fit(
        directory,
        stored_by_name,
        {name: param.shape for name, param in inner.named_parameters()},
        ignored,
    )
    return Weights(directory, {f"model.{name}": stored for name, stored in fitting.stored.items()})


def library() -> Any:
    """`transformers`, imported when it is needed. Raises `ModelError` where it is missing."""
    without_talk_of_kernels()
    try:
        import transformers
    except ImportError as missing:
        raise ModelError(
            'model "hf" needs the package transformers: pip install "plait[hf]"'
        ) from missing
    return transformers


def vocabulary(config: str | Path | JsonMapping) -> int | None:
    """The number of tokens of a config, or of its family where it says none; None where unknown."""
    table = read_config(config)
    known = library().models.auto.configuration_auto.CONFIG_MAPPING
    model_type = table.pop("model_type", None)
    if model_type not in known:
        return None
    settings = known[model_type](**table).get_text_config()
    size: int | None = getattr(settings, "vocab_size", None)
    return size


def read_config(config: str | Path | JsonMapping) -> JsonObject:
    """The table of a config, wherever it is. Raises `ModelError` for a file that has none."""
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ModelError(
            f"the config {str(path)!r} cannot be read: {failure.strerror}"
        ) from failure
    except ValueError as failure:
        raise ModelError(f"the config {str(path)!r} is not JSON: {failure}") from failure
    if not isinstance(table, dict):
        raise ModelError(f"the config {str(path)!r} holds a {type(table).__name__}, not a table")
    return table


def blocks_of(model: nn.Module) -> str | None:
    """The pattern of the repeated blocks: the module list that holds the most parameters; None
    where there is no list.

    >>> blocks_of(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)]), "b": nn.Linear(9, 9)}))
    'a.*'
    """
    sizes = {}
    for name, module in model.named_modules():
        numels = [param.numel() for param in module.parameters()]
        if isinstance(module, nn.ModuleList) and numels:
            sizes[name] = sum(numels)
    return f"{max(sizes, key=sizes.__getitem__)}.*" if sizes else None
