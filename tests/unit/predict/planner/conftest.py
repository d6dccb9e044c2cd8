"""A config file that tests of the planner's verbs share."""

import pytest

FILE = """
[model]
name = "llama"
num_hidden_layers = 4
hidden_size = 512
num_attention_heads = 8
vocab_size = 32000
[data]
seq_len = 1024
[train]
global_batch = 32
"""


@pytest.fixture
def path(tmp_path):
    """The path of a config file."""
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    return str(file)
