"""Scripts with branches: one that does not run gives nothing, and an open one is named."""

from __future__ import annotations

import pytest

from plait.interop import Imported, import_text

SIZES = "--num-layers $LAYERS --hidden-size $WIDTH --num-attention-heads 8 --lr 1e-4"
BY_IF = """
if [ $SIZE = 7B ]; then
LAYERS=32
WIDTH=4096
elif [[ "$SIZE" == 13B ]]; then
LAYERS=40
WIDTH=5120
else
LAYERS=80
WIDTH=8192
fi
"""
BY_CASE = """
case $SIZE in
7B) LAYERS=32; WIDTH=4096;;
"13B" | 13b)
    LAYERS=40
    WIDTH=5120 ;;
*)
    LAYERS=80
    WIDTH=8192
    ;;
esac
"""


def imported(script: str) -> Imported:
    return import_text(f"#!/bin/bash\n{script}\ntorchrun x.py {SIZES}\n", "shell", "megatron-lm")


@pytest.mark.parametrize("branches", [BY_IF, BY_CASE])
@pytest.mark.parametrize(("size", "layers"), [("7B", 32), ("13B", 40), ("70B", 80)])
def test_the_branch_of_a_known_value_is_taken(branches: str, size: str, layers: int) -> None:
    model = imported(f"SIZE={size}\n{branches}").config["model"]
    assert model["num_hidden_layers"] == layers
    assert model["hidden_size"] == {32: 4096, 40: 5120, 80: 8192}[layers]


@pytest.mark.parametrize("branches", [BY_IF, BY_CASE])
def test_values_of_branches_that_are_open_are_named_and_not_guessed(branches: str) -> None:
    found = imported(f"LAYERS=2\nSIZE=$1\n{branches}")
    assert "model" not in found.config
    reasons = {item.key: item.reason for item in found.unmapped}
    assert "in a branch that may not run" in reasons["num-layers"]
    assert "in a branch that may not run" in reasons["hidden-size"]


def test_options_of_an_open_branch_are_named_and_not_guessed() -> None:
    found = imported('if [ "$MOE" = 1 ]; then ARGS="--expert-model-parallel-size 4 --bf16"; fi')
    assert found.plan == "dp1"
    reasons = {item.key: (item.value, item.reason) for item in found.unmapped}
    assert reasons["expert-model-parallel-size"][0] == "4"
    assert "whose condition is not known here" in reasons["bf16"][1]


def test_a_branch_that_does_not_run_gives_no_option() -> None:
    script = 'NODES=1\nif [ $NODES -gt 1 ]; then\nA="--bf16 \\\n  --fp16"\nfi\nB="--seed 3"'
    found = imported(script)
    assert found.config["train"]["seed"] == 3
    assert not {"bf16", "fp16"} & ({*found.mapped} | {item.key for item in found.unmapped})


def test_python_in_a_script_opens_no_branch() -> None:
    found = imported("python - <<EOF\nif True:\n    print(1)\nelse:\n    pass\nEOF\nSEED=3")
    assert found.config["train"]["lr"] == 1e-4


def test_several_variables_may_stand_in_a_line() -> None:
    script = 'TP=${T:-"2"}; MBS=2; GBS=$(( MBS * 64 ))\nA="--micro-batch-size $MBS --bf16"'
    found = imported(f'{script}\nB="--global-batch-size $GBS --tensor-model-parallel-size $TP"')
    assert found.plan == "tp2 dp64 precision:bf16"
    assert found.config["train"]["global_batch"] == 128


def test_stages_that_follow_from_an_unknown_number_of_layers_are_named() -> None:
    found = imported(
        'A="--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"'
    )
    assert "num-layers-per-virtual-pipeline-stage" in {item.key for item in found.unmapped}
