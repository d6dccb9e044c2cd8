"""Scripts with branches: one that does not run gives nothing, and an open one is named."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
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


@pytest.mark.parametrize(
    ("script", "plan"),
    [
        ("TP=2\n[ $TP = 2 ] && TP=4\nA=(--tensor-model-parallel-size $TP)", "tp4"),
        ("TP=2\n[[ $TP -gt 1 ]] || TP=8\nA=(--tensor-model-parallel-size $TP)", "tp2"),
        ("N=1\n[ $N = 1 ] && TP=4 || TP=8\nA=(--tensor-model-parallel-size $TP)", "tp4"),
        ("N=1\n[ $N = 2 ] && A+=(\n  --tensor-model-parallel-size 8\n)", "dp1"),
        ("N=1\n[ $N = 2 ] || { TP=4; }\nA=(--tensor-model-parallel-size $TP)", "tp4"),
        ("N=1\n[ $N = 2 ] && {\n  TP=4\n}\nA=(--tensor-model-parallel-size ${TP:-2})", "tp2"),
    ],
)
def test_what_stands_behind_a_test_runs_where_it_holds(script: str, plan: str) -> None:
    assert imported(script).plan == plan


def test_options_behind_an_open_test_are_named_and_not_guessed() -> None:
    found = imported("(( MOE )) && A+=(--tensor-model-parallel-size 8)")
    assert found.plan == "dp1"
    assert "tensor-model-parallel-size" in {item.key for item in found.unmapped}


@pytest.mark.parametrize(
    "text",
    [
        "cat > job.sh <<'EOF'\nTP=8\ntorchrun x.py --tensor-model-parallel-size 8\nEOF",
        "cat <<EOF\nif you want more, don't\ncase of need in\n--tensor-model-parallel-size 8\nEOF",
        'usage() {\n  TP=8\n  echo "--tensor-model-parallel-size 8"\n}\nTP=2',
        'echo "say --tensor-model-parallel-size 8"',
        'echo "say\n  --tensor-model-parallel-size 8\n"',
    ],
)
def test_texts_that_no_shell_runs_change_nothing(text: str) -> None:
    found = imported(f"TP=2\n{text}\nA=(--tensor-model-parallel-size $TP)")
    assert found.plan == "tp2"


def test_a_text_that_a_shell_runs_is_read() -> None:
    script = "sbatch <<EOF\ntorchrun x.py --tensor-model-parallel-size 4\nEOF"
    assert imported(script).plan == "tp4"


def test_a_function_that_is_not_called_is_named_and_one_that_is_called_runs() -> None:
    script = "run ()\n{\n  [ -d x ] || { mkdir x; }\n  A=(--tensor-model-parallel-size 4)\n}"
    assert imported(f"{script}\nrun").plan == "tp4"
    found = imported(script)
    assert found.plan == "dp1"
    assert "tensor-model-parallel-size" in {item.key for item in found.unmapped}


@pytest.mark.parametrize(
    ("begin", "end"), [("if [ $A = 1 ]; then", "fi"), ("case $A in", "esac"), ("f() {", "}")]
)
def test_a_block_without_an_end_is_refused(begin: str, end: str) -> None:
    with pytest.raises(ConfigError, match=f"not valid shell: a block has no `{end}`"):
        imported(f"A=1\n{begin}\nA=(--tensor-model-parallel-size 4)")


def test_a_variable_that_is_not_set_is_no_value_of_the_option_before_it() -> None:
    assert imported("A=(--tensor-model-parallel-size 2 $EXTRA ${OTHERS[@]})").plan == "tp2"
