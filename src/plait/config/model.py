"""`[model]`: one frozen schema for each family, with the key names of Hugging Face configs.

What a family does not have is an unknown key, so that a typing error cannot become a default.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST_COUNT: Final = 10**15  # a count above it is a typing error, and no float holds it exactly
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Rate = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Reference = Annotated[str, Field(pattern=r"^[^:\s]+:[^:\s]+$")]  # module:function


def path_text(value: Any) -> Any:
    """A path as its text, anything else as it is."""
    return str(value) if isinstance(value, os.PathLike) else value


PathText = Annotated[str, BeforeValidator(path_text)]


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, no silent conversion of `"8"` to 8."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    def as_dict(self) -> dict[str, Any]:
        """The keys that have a value, as JSON and TOML can hold them; the name of the thing
        first.
        """
        keys = self.model_dump(mode="json", exclude_none=True)
        return {
            key: keys[key] for key in sorted(keys, key=lambda key: key not in ("name", "python"))
        }


class ModelSection(Section):
    """What all models share. `roles`: from module pattern to role, for plans that split layers;
    None takes the model's own.
    """

    roles: dict[str, str] | None = None

    def keys_for_factory(self) -> dict[str, Any]:
        """The keyword arguments of the model factory: `name` (or `python`) and every key that has a
        value, but `roles`.
        """
        return {key: value for key, value in self.as_dict().items() if key != "roles"}


class MLP(ModelSection):
    """A stack of linear layers."""

    name: Literal["mlp"]
    in_features: Count
    hidden_size: Count
    num_hidden_layers: Count
    out_features: Count
    dropout: Rate = 0.0


class Transformer(ModelSection):
    """What the decoders share."""

    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    tie_word_embeddings: bool = False
    initializer_range: Positive = 0.02
    dropout: Rate = 0.0


class GPT(Transformer):
    """GPT-2's architecture."""

    name: Literal["gpt"]
    max_position_embeddings: Count = 1024
    layer_norm_epsilon: Positive = 1e-5


class Llama(Transformer):
    """Llama's architecture, dense or (with `num_local_experts`) a mixture of experts.

    What the keys of experts mean, and their defaults, stands in `plait.models.llama.mixture` and
    `models.router_settings`.
    """

    name: Literal["llama"]
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-6
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    num_shared_experts: Annotated[int, Field(ge=0)] | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0)] | None = None
    topk_method: (
        Literal["greedy", "group_limited_greedy", "noaux_tc", "noisy", "expert_choice"] | None
    ) = None
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Positive | None = None
    n_group: Count | None = None
    topk_group: Count | None = None
    capacity_factor: Positive | None = None
    drop_policy: Literal["score", "position"] | None = None
    router_aux_loss_coef: NonNegative | None = None
    seq_aux: bool | None = None
    router_z_loss_coef: NonNegative | None = None
    router_bias_update_speed: NonNegative | None = None


EXPERT_KEYS: Final = tuple(Llama.model_fields)[
    tuple(Llama.model_fields).index("num_experts_per_tok") :
]
"""The keys of `Llama` that mean nothing without `num_local_experts`."""


class ResNet(ModelSection):
    """A residual network for images."""

    name: Literal["resnet"]
    depth: Literal[18, 34, 50, 101, 152] = 18
    num_classes: Count = 1000
    in_channels: Count = 3
    width: Count = 64
    norm: Literal["group", "batch"] = "group"


class FNO(ModelSection):
    """A Fourier neural operator."""

    name: Literal["fno"]
    in_channels: Count = 1
    out_channels: Count = 1
    hidden_size: Count
    num_hidden_layers: Count
    modes: Count


class HuggingFace(ModelSection):
    """A model of `transformers`: the path of its config.json, or the table itself with
    `model_type`.
    """

    name: Literal["hf"]
    config: PathText | dict[str, Any]
    weights: PathText | None = None


class Python(ModelSection):
    """A user's own model: a function that returns an `nn.Module`, called with `arguments`."""

    python: Reference
    arguments: dict[str, Any] | None = None


MODELS: Final[dict[str, type[ModelSection]]] = {
    "mlp": MLP,
    "gpt": GPT,
    "llama": Llama,
    "resnet": ResNet,
    "fno": FNO,
    "hf": HuggingFace,
}
"""The schema of each `name`; a `[model]` with `python` is `Python`."""

LANGUAGE_MODELS: Final = ("gpt", "llama", "hf")
