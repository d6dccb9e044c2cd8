"""`[model]`: one frozen schema for each family, with the key names of Hugging Face configs.

What a family does not have is an unknown key, so that a typing error cannot become a default.
"""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from plait.values import JsonObject

LARGEST_COUNT: Final = 10**15  # a count above it is a typing error, and no float holds it exactly
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Rate = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Reference = Annotated[str, Field(pattern=r"^[^:\s]+:[^:\s]+$")]  # module:function


def path_text(value: object) -> object:
    """A path as its text, anything else as it is."""
    return str(value) if isinstance(value, os.PathLike) else value


def as_tuple(value: object) -> object:
    """A list as a tuple, since TOML has arrays only; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


PathText = Annotated[str, BeforeValidator(path_text)]


class Section(BaseModel):
    """The base of all sections: frozen, no unknown keys, no silent conversion of `"8"` to 8."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def as_dict(self) -> dict[str, object]:
        """The keys that have a value, as JSON and TOML can hold them; the name of the thing
        first.
        """
        keys = self.model_dump(mode="json", exclude_none=True)
        return {
            key: keys[key] for key in sorted(keys, key=lambda key: key not in ("name", "python"))
        }


class ModelSection(Section):
    """The base of all models."""

    roles: dict[str, str] | None = None
    """Roles by module pattern, for plans that split layers; by default the model's own."""

    def keys_for_factory(self) -> JsonObject:
        """The keyword arguments of the model factory: `name` (or `python`) and every key that has a
        value, but `roles`.
        """
        return {key: value for key, value in self.as_dict().items() if key != "roles"}


class MLPConfig(ModelSection):
    """A stack of linear layers."""

    name: Literal["mlp"]
    """The family."""
    in_features: Count
    """Features of a sample."""
    hidden_size: Count
    """Features of a hidden layer."""
    num_hidden_layers: Count
    """Hidden layers."""
    out_features: Count
    """Features of the output, or classes."""
    dropout: Rate = 0.0
    """The probability of dropout."""


class TransformerConfig(ModelSection):
    """The keys that decoders share."""

    num_hidden_layers: Count
    """Blocks."""
    hidden_size: Count
    """Features of a token."""
    num_attention_heads: Count
    """Heads of the queries."""
    intermediate_size: Count
    """Features inside the MLP; by default 4 x hidden_size."""
    vocab_size: Count
    """Tokens of the vocabulary."""
    tie_word_embeddings: bool = False
    """Whether the embedding is the output layer as well."""
    initializer_range: Positive = 0.02
    """Standard deviation of the initial weights."""
    dropout: Rate = 0.0
    """The probability of dropout."""


class GPTConfig(TransformerConfig):
    """GPT-2's architecture."""

    name: Literal["gpt"]
    """The family."""
    max_position_embeddings: Count = 1024
    """The longest sequence."""
    layer_norm_epsilon: Positive = 1e-5
    """The epsilon of the layer norms."""


class LlamaConfig(TransformerConfig):
    """Llama's architecture, dense or (with `num_local_experts`) a mixture of experts.

    What the keys of experts mean, and their defaults, stands in `plait.models.llama.mixture` and
    `models.router_settings`.
    """

    name: Literal["llama"]
    """The family."""
    num_key_value_heads: Count | None = None
    """Heads of keys and values; by default those of the queries."""
    head_dim: Count | None = None
    """Features of a head; by default hidden_size / num_attention_heads."""
    max_position_embeddings: Count = 2048
    """The longest sequence."""
    rope_theta: Positive = 10000.0
    """The base of the rotary positions."""
    rms_norm_eps: Positive = 1e-6
    """The epsilon of the RMS norms."""
    num_local_experts: Count | None = None
    """Experts of a block; without it the model is dense."""
    num_experts_per_tok: Count | None = None
    """Experts that each token goes to."""
    moe_intermediate_size: Count | None = None
    """Features inside an expert."""
    num_shared_experts: Annotated[int, Field(ge=0)] | None = None
    """Experts that every token goes to."""
    first_k_dense_replace: Annotated[int, Field(ge=0)] | None = None
    """Leading blocks without experts."""
    topk_method: (
        Literal["greedy", "group_limited_greedy", "noaux_tc", "noisy", "expert_choice"] | None
    ) = None
    """The rule by which tokens choose experts."""
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    """The function from router logits to scores."""
    norm_topk_prob: bool | None = None
    """Whether the chosen scores are normalised to sum 1."""
    routed_scaling_factor: Positive | None = None
    """The factor on the output of the chosen experts."""
    n_group: Count | None = None
    """Groups of experts."""
    topk_group: Count | None = None
    """Groups among which a token chooses."""
    capacity_factor: Positive | None = None
    """Tokens that an expert takes, in multiples of an even share."""
    drop_policy: Literal["score", "position"] | None = None
    """The order in which tokens beyond the capacity are dropped."""
    router_aux_loss_coef: NonNegative | None = None
    """Weight of the balance loss."""
    seq_aux: bool | None = None
    """Whether the balance loss is one of each sequence."""
    router_z_loss_coef: NonNegative | None = None
    """Weight of the z-loss of router logits."""
    router_bias_update_speed: NonNegative | None = None
    """Step of the bias that balances experts without a loss."""


EXPERT_KEYS: Final = tuple(LlamaConfig.model_fields)[
    tuple(LlamaConfig.model_fields).index("num_experts_per_tok") :
]
"""The keys of `LlamaConfig` that mean nothing without `num_local_experts`."""


class ResNetConfig(ModelSection):
    """A residual network for images."""

    name: Literal["resnet"]
    """The family."""
    depth: Literal[18, 34, 50, 101, 152] = 18
    """Layers."""
    num_classes: Count = 1000
    """Classes."""
    in_channels: Count = 3
    """Channels of an image."""
    width: Count = 64
    """Channels of the first stage."""
    norm: Literal["group", "batch"] = "group"
    """The normalisation."""


class FNOConfig(ModelSection):
    """A Fourier neural operator."""

    name: Literal["fno"]
    """The family."""
    in_channels: Count = 1
    """Channels of the input field."""
    out_channels: Count = 1
    """Channels of the output field."""
    hidden_size: Count
    """Channels of a hidden field."""
    num_hidden_layers: Count
    """Fourier layers."""
    modes: Count
    """Fourier modes that are kept in each direction."""


class HuggingFaceConfig(ModelSection):
    """A model of `transformers`: the path of its config.json, or the table itself with
    `model_type`.
    """

    name: Literal["hf"]
    """A model of `transformers`."""
    config: PathText | JsonObject
    """The path of a config.json, or a table with `model_type`."""
    weights: PathText | None = None
    """A folder of safetensors to start from."""
    task: Literal["causal", "masked", "seq2seq", "image"] | None = None
    """The head of the model: causal (the default), masked, seq2seq or image classes."""


class Python(ModelSection):
    """A user's own model: a function that returns an `nn.Module`, called with `arguments`."""

    python: Reference
    """A user's function `module:function` that returns the model."""
    arguments: JsonObject | None = None
    """The keyword arguments of the function."""


MODELS: Final[dict[str, type[ModelSection]]] = {
    "mlp": MLPConfig,
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "resnet": ResNetConfig,
    "fno": FNOConfig,
    "hf": HuggingFaceConfig,
}
"""The schema of each `name`; a `[model]` with `python` is `Python`."""

LANGUAGE_MODELS: Final = ("gpt", "llama", "hf")
