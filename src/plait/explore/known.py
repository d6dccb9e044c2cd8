"""Files of known models: the config to begin with, and the refusal where a name is no file."""

from __future__ import annotations

import json

from plait.errors import ConfigError, nearest
from plait.predict.cost.model.known import KNOWN


def refuse_as_file(name: str) -> None:
    """Say how to write the file of a known model, where a file is needed.

    Raises:
        ConfigError: `name` is a known model.
    """
    if name.lower() in KNOWN:
        raise ConfigError(
            f"{name}: a known model's name is for plan, estimate and explore; here a TOML file is "
            f"needed, and plait config --model {name} > {name}.toml writes one"
        )


def starting_config(name: str) -> str:
    """A config of a known model as TOML, to be saved and changed. Errors: `ConfigError`."""
    if name.lower() not in KNOWN:
        raise ConfigError(f"no model is known as '{name}'; {nearest(name.lower(), KNOWN)}")
    known = KNOWN[name.lower()]
    sizes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in known.model.items())
    return f"""# {name.lower()}, with the sizes of {known.source}.
# Save it as a file, and change what you need.
# plait plan FILE --cluster h100x64 chooses a plan. plait train FILE runs one, from random weights.

[model]
name = "hf"
config = {{ {sizes} }}
# weights = "FOLDER"          # of safetensors, to begin with trained weights

[data]
name = "stdlib"               # Python's own source; for your own text: plait config --list
tokenizer = "bytes"           # each byte is a token: enough for a first run
seq_len = {known.seq_len}

[train]
steps = 100
global_batch = 64
optimizer = "adamw"
lr = 3e-4

[plan]
text = "auto"                 # or a plan, such as "dp8:zero3 precision:bf16"
"""
