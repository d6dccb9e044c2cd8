"""Nothing that a Hugging Face model starts from is memory that nobody wrote."""

from __future__ import annotations

import pytest

from tests.unit.models import hf_families

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", hf_families.SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_every_parameter_and_buffer_is_written(family: str) -> None:
    assert hf_families.unwritten(family) == []
