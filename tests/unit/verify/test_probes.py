from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import plait
from plait.cluster.products import (
    FILE_NAME,
    FORWARD,
    RULE,
    ProductClass,
    ProductTable,
    keep_table,
)
from plait.comm import World
from plait.engine.choosing import chosen_options
from plait.plan import Plan
from plait.products import MEASURED
from plait.products.measure import this_machine
from plait.verify.judging import same_data
from plait.verify.probes import PROBES
from plait.verify.problem import Problem
from plait.verify.ranks import _rank_main
from plait.verify.run import VerifyTask
from plait.verify.walks import SCALED
from tests.parity.verify_problems import problem

PLAN = Plan.parse("dp2 mb2 precision:float64")


def apply(name: str, model: str = "gpt", plan: Plan = PLAN, **keys) -> tuple[Problem, Plan]:
    changed = PROBES[name].apply(problem(model, **keys), plan, 3)
    assert not isinstance(changed, str), changed
    return changed


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [("tied", "mlp", "no weights that can be tied"), ("dropout", "resnet", "no dropout")],
)
def test_a_probe_that_has_no_meaning_says_why(name, model, reason):
    assert reason in PROBES[name].apply(problem(model), PLAN, 3)


def test_a_batch_norm_is_given_two_samples_a_slice():
    small = problem("batch-norm", global_batch=7)
    reason = PROBES["accumulation"].apply(small, PLAN, 3)
    assert reason == "its batch norm needs 2 samples a slice, and mb4 leaves one"
    reason = PROBES["last-batch"].apply(small, PLAN, 3)
    assert reason == "its batch norm needs 2 samples a slice, and 6 samples leave one"
    apply("accumulation", "resnet", global_batch=7)
    apply("accumulation", "batch-norm", global_batch=16)
    large = replace(small, data={"name": "random", "image_size": 64})
    assert not isinstance(PROBES["accumulation"].apply(large, PLAN, 3), str)


class Tied(nn.Module):
    """One weight, used as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 8)
        self.head = nn.Linear(8, 29, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_a_model_that_is_tied_by_itself_is_probed_as_it_is():
    given = replace(problem("gpt"), model={"python": f"{__name__}:Tied"})
    changed = PROBES["tied"].apply(given, PLAN, 3)
    assert not isinstance(changed, str), changed
    assert changed[0].model == given.model and changed[0].train.optimizer == "adamw"


def test_every_limit_in_the_code_is_scaled_down():
    """A way that only large tensors take is named where it is chosen, and in the proof's table."""
    source = Path(plait.__file__).parent
    texts = [path.read_text() for path in source.rglob("*.py")]
    asked = {name for text in texts for name in re.findall(r'(?:beyond|limit)\(\s*"(\w+)"', text)}
    assert asked == SCALED.keys()


def test_uneven_tokens_are_uneven_on_every_slice():
    changed, plan = apply("uneven-tokens")
    counts = [
        int((part.batch[1] != -100).sum())
        for part in changed.slices(plan)(0, changed.batches(1, torch.float64)[0])
    ]
    assert len(counts) == 4 and len(set(counts)) > 1


def test_accumulation_has_more_micro_batches():
    assert apply("accumulation")[1].micro_batches == 4
    assert apply("accumulation", plan=Plan.parse("dp2"))[1].micro_batches == 3


def test_the_last_batch_does_not_divide():
    changed, plan = apply("last-batch")
    batches = changed.batches(3, torch.float64)
    sizes = [len(batch[0]) for batch in batches]
    assert sizes == [12, 11, 12] and sizes[1] % (plan.dp.size * plan.micro_batches)
    assert not torch.equal(batches[0][0], batches[2][0])  # another epoch, in an order of its own


def test_some_are_frozen_and_one_is_unused():
    model = apply("frozen-unused")[0].make_model()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert 0 < len(frozen) < len(list(model.parameters())) and "idle.weight" not in frozen
    assert "idle.weight" in dict(model.named_parameters())


def test_dropout_and_tied_weights_are_switched_on():
    assert apply("dropout")[0].model["dropout"] == 0.2
    assert apply("tied")[0].model["tie_word_embeddings"] is True


def test_optimizers():
    assert {probe.optimizer for probe in PROBES.values()} == {"sgd", "adamw"}
    assert apply("sgd")[0].train.momentum > 0 and apply("adamw")[0].train.eps == 1e-5
    assert apply("schedule")[0].recipe().lr_factor(0) != apply("schedule")[0].recipe().lr_factor(2)


def test_slices_join_to_the_batch_and_are_what_the_loader_gives():
    given = problem("gpt", global_batch=7)
    batch = given.batches(1, torch.float64)[0]
    parts = given.slices(PLAN)(0, batch)
    assert torch.equal(torch.cat([part.batch[0] for part in parts]), batch[0])
    for rank in range(2):
        own = torch.cat([part.batch[0] for part in parts if part.rank == rank])
        assert torch.equal(own, next(given.loader(rank, 2))[0])


@pytest.mark.long
def test_slices_of_packed_samples_are_cut_by_samples():
    data = {"name": "stdlib", "seq_len": 16, "packing": True}
    plain = problem("gpt", global_batch=7)
    sizes = {"vocab_size": 256, "max_position_embeddings": 16}
    given = replace(plain, data=data, model={**plain.model, **sizes})
    for masked in (given, replace(given, masked=True), replace(given, num_samples=9)):
        (tokens, documents, positions), _ = masked.batches(1, torch.float64)[0]
        parts = masked.slices(PLAN)(0, masked.batches(1, torch.float64)[0])
        assert [len(part.batch[0][0]) for part in parts] == [2, 1, 2, 2]
        assert torch.equal(torch.cat([part.batch[0][1] for part in parts]), documents)
        assert tokens.shape == positions.shape == (7, 16)


def test_equal_data_on_all_ranks_proves_nothing():
    given = problem("gpt")
    parts = given.slices(PLAN)(0, given.batches(1, torch.float64)[0])
    assert same_data(parts) == []
    assert "same data" in same_data([parts[0], parts[0]])[0]


def test_a_proof_multiplies_as_training_will_and_with_onednn(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    table = ProductTable(frozenset({ProductClass(FORWARD, 16, 1 << 21)}))
    keep_table(tmp_path / ".cache" / "plait" / FILE_NAME, this_machine(), table)

    def products(world: World, task: VerifyTask) -> object:
        plan = Plan.parse(task.plan)
        return chosen_options(task.problem.options(plan), plan, world).linear_product

    given = problem("gpt")
    assert given.options(PLAN).linear_product == MEASURED
    task = VerifyTask(given, "dp1", 1, None, ())
    assert _rank_main(products, task) == table
    hurried = replace(task, problem=replace(given, hurried=True))
    assert _rank_main(products, hurried) == RULE


def test_a_config_with_muon_is_proven_with_muon():
    assert apply("adamw", optimizer="muon")[0].train.optimizer == "muon"
    assert apply("sgd", optimizer="muon")[0].train.optimizer == "sgd"
