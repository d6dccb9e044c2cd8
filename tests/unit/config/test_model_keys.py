"""A key of a model that stands in the wrong place: the message says where it goes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.test_faults import refused


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"model": {"python": "m:f", "width": 3}},
            "unknown key model.width; what the function takes goes into "
            "arguments = { width = ... }",
        ),
        (
            {"model": {"python": "m:f", "kwargs": {"width": 3}}},
            "unknown key model.kwargs; did you mean 'arguments', the table of what the function",
        ),
        (
            {"model": {"name": "hf"}},
            "model.config is missing; give the path of a config.json, or a table of its keys",
        ),
        (
            {"model": {"name": "hf", "config": "c.json", "hidden_size": 3}},
            "unknown key model.hidden_size; a key of the library's config goes into "
            "config = { hidden_size = ... }",
        ),
    ],
)
def test_keys_of_a_models_own_table(source: dict[str, Any], message: str) -> None:
    assert message in refused(source)
