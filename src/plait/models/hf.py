"""Causal language models of Hugging Face `transformers`, as they are, on the meta device.

Only their edges are changed: the forward takes token numbers and gives logits, without caches or wrappers around them;
and every module that owns tensors gets a `reset_parameters`, their library's own initialisation of that one module (so
without what it does to grandchildren, such as GPT-2's smaller residual projections).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError, nearest


class HuggingFace(nn.Module):
    """Token numbers [B, S] -> logits [B, S, V] of `self.model`, whose parameter names are those of the library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        initialise: Any = model._init_weights
        for module in model.modules():
            if module._parameters or module._buffers:
                module.reset_parameters = functools.partial(initialise, module)  # type: ignore[assignment]

    def forward(self, input_ids: Tensor) -> Tensor:
        """No cache, and the mask of the library's own: causal, nothing padded."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def make(config: str | Path | Mapping[str, Any], weights: str | Path | None = None) -> HuggingFace:
    """The causal model of a config: the path of a `config.json` (or of its directory), or its table with `model_type`.

    On the meta device; with `weights`, a directory of safetensors, in memory as float32. Raises `ModelError` without
    `transformers`, and for a config or weights that it cannot use.
    """
    transformers = library()
    table = read_config(config)
    model_type = table.pop("model_type", None)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        raise ModelError(f"model_type = {model_type!r} is not one that transformers knows; {nearest(str(model_type), known)}")
    try:
        with torch.device("meta"):
            settings = transformers.AutoConfig.for_model(model_type, **table)
            model = transformers.AutoModelForCausalLM.from_config(settings)
    except Exception as failure:
        raise ModelError(f"transformers cannot make a causal model of model_type {model_type!r}: {failure}") from failure
    made = HuggingFace(model.train())
    if weights is not None:
        load_weights(made, Path(weights))
    return made


def load_weights(model: HuggingFace, directory: Path) -> None:
    """Give a meta model the values of the safetensors files in a directory, and its buffers those of its library."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"the weights {str(directory)!r} hold no *.safetensors files")
    try:
        values = {name: value.float() for file in files for name, value in load_file(file).items()}
    except (OSError, SafetensorError) as failure:
        raise ModelError(f"the weights {str(directory)!r} cannot be read: {failure}") from failure
    inner: Any = model.model
    prefix = f"{inner.base_model_prefix}."
    if not any(name.startswith(prefix) for name in values):  # saved from the base model, without the head
        values = {f"{prefix}{name}": value for name, value in values.items()}
    wrong = [
        f"{name} {list(values[name].shape)} instead of {list(param.shape)}" if name in values else f"no {name}"
        for name, param in inner.named_parameters()
        if name not in values or values[name].shape != param.shape
    ]
    if wrong:
        raise ModelError(f"the weights {str(directory)!r} do not fit the config: {'; '.join(wrong[:3])} ({len(wrong)} in all)")
    inner.load_state_dict({name: values[name] for name, _ in inner.named_parameters()}, strict=False, assign=True)
    inner.tie_weights()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if module._buffers and not module._parameters:
            module.reset_parameters()  # type: ignore[operator]


def library() -> Any:
    """`transformers`, imported when it is needed."""
    try:
        import transformers
    except ImportError as missing:
        raise ModelError('model "hf" needs the package transformers: pip install "plait[hf]"') from missing
    return transformers


def read_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The table of a config, wherever it is."""
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ModelError(f"the config {str(path)!r} cannot be read: {failure.strerror}") from failure
    except ValueError as failure:
        raise ModelError(f"the config {str(path)!r} is not JSON: {failure}") from failure
    if not isinstance(table, dict):
        raise ModelError(f"the config {str(path)!r} holds a {type(table).__name__}, not a table")
    return table


def blocks_of(model: nn.Module) -> str | None:
    """The pattern of the repeated blocks: the module list that holds the most parameters; None where there is no list.

    >>> blocks_of(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)]), "b": nn.Linear(9, 9)}))
    'a.*'
    """
    sizes = {
        name: sum(param.numel() for param in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    }
    return f"{max(sizes, key=sizes.__getitem__)}.*" if sizes else None
