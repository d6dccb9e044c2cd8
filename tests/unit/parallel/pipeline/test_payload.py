"""What passes between stages: any nesting of tensors goes and comes back; anything else is refused
by its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from plait.errors import ModelError
from plait.parallel.pipeline.payload import TensorForm, pack, unpack


class Pair(NamedTuple):
    left: Any
    right: Any


A = torch.zeros(2)
B = torch.ones(3, dtype=torch.int64)
C = torch.full((), 2.0, requires_grad=True)


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, B),
        [A, None, (B, {"c": C})],
        {"x": {"y": [A]}, "z": None},
        Pair(A, Pair(B, None)),
        (),
        None,
    ],
)
def test_any_nesting_comes_back_as_it_went(value: Any) -> None:
    payload = pack(value, "'layer'")
    again = unpack(payload)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert all(isinstance(tensor, torch.Tensor) for tensor in payload.tensors)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((A, 3), "'layer' returns a int where a stage ends"),
        ({"x": "word"}, "returns a str"),
        (torch.zeros(2, dtype=torch.complex64), "a complex64 tensor"),
        (torch.zeros(2, 2).to_sparse(), "a sparse_coo tensor"),
    ],
)
def test_what_cannot_be_sent_is_named_with_the_cure(value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        pack(value, "'layer'")
    assert "cut elsewhere" in str(caught.value)


def test_a_form_is_memory_for_what_will_come() -> None:
    form = TensorForm.of(C)
    assert form == TensorForm((), torch.float32, True)
    assert form.empty(torch.device("cpu")).shape == ()
