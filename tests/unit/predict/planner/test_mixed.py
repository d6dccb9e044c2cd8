"""Two kinds of device: samples or layers by speed, and what is refused."""

import json
from dataclasses import replace

import pytest

import plait
from plait.cli import main
from plait.cluster.mixed import MixedCluster
from plait.errors import ClusterError, ConfigError, PlanError, WorldSizeError
from plait.predict.planner.mixed import _divided, choose_mixed

CONFIG = {
    "model": {
        "name": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    },
    "data": {"seq_len": 4096},
    "train": {"global_batch": 64},
}
MIXED = "h100x8+a100-80gbx8"


def with_plan(**keys):
    return {**CONFIG, "plan": keys}


def test_the_mixed_plan_is_faster_than_either_kind_and_near_both_together():
    best = choose_mixed(CONFIG, MIXED)[0]
    alone = [plait.choose(CONFIG, part)[0].step_seconds for part in MIXED.split("+")]
    together = 1 / sum(1 / seconds for seconds in alone)
    assert best.num_devices == 16 and (best.shares or best.counts)
    assert best.fits and together < best.step_seconds < min(alone)
    assert together / best.step_seconds > 0.8


def test_choose_takes_two_kinds_and_search_says_what_does():
    assert plait.choose(CONFIG, MIXED, top=3) == choose_mixed(CONFIG, MIXED, top=3)
    named = {**CONFIG, "cluster": {"name": MIXED}}
    assert plait.choose(named, top=1) == choose_mixed(CONFIG, MIXED, top=1)
    for wrong in ({"fix": "tp2"}, {"risk": 0.1}, {"runnable": True}, {"objective": "cost"}):
        with pytest.raises(ConfigError, match="kind"):
            plait.choose(CONFIG, MIXED, **wrong)
    with pytest.raises(ClusterError, match=r"several kinds of device.*take plait\.choose"):
        plait.search(CONFIG, MIXED)


def test_a_model_so_small_that_a_sample_more_costs_nothing_has_plans():
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    config = {
        "model": {"name": "gpt", "vocab_size": 1024, **sizes},
        "data": {"seq_len": 128},
        "train": {"global_batch": 16},
    }
    assert plait.choose(config, "h100x4+a100-80gbx4", top=1)


def test_one_kind_alone_is_asked_about_the_batch_of_all(capsys):
    config = {**CONFIG, "train": {}}
    tokens = [one.tokens_per_second * one.step_seconds for one in choose_mixed(config, MIXED)]
    assert tokens == pytest.approx([64 * 4096] * len(tokens))
    for verb in (["plan"], ["estimate", "--plan", "dp16 precision:bf16"]):
        main([verb[0], "llama3-8b", "--cluster", MIXED, *verb[1:], "--json"])
        assert "64 samples a step are assumed" in json.loads(capsys.readouterr().out)["notes"][0]


def test_a_plan_of_one_kind_alone_names_it(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "gpt"\nnum_hidden_layers = 24\nhidden_size = 2048\n'
        "num_attention_heads = 16\nvocab_size = 50304\n"
        "[data]\nseq_len = 2048\n[train]\nglobal_batch = 64\n"
    )
    asked = ["plan", str(path), "--cluster", "h100x8+l40sx8"]
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    first, *others = data["plans"]
    assert first["num_devices"] == 8 and first["part"] == "h100x8"
    assert all("part" not in one for one in others if one["num_devices"] == 16)
    assert data["notes"] == [
        f"{first['plan']} is run on h100x8 alone, and the other devices are idle"
    ]
    assert main(asked) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "on" and row.split()[-1] == "h100x8"


@pytest.mark.parametrize("cluster", ["l40sx8+rtx4090x8", "rtx4090x8+l40sx8", MIXED])
@pytest.mark.parametrize("pipeline", ["pp4:zbv dp4:zero1", "pp4:1f1b dp4:zero1", "pp2 dp8:zero3"])
def test_the_breakdown_adds_up_to_the_step(cluster, pipeline):
    config = {**CONFIG, "model": {**CONFIG["model"], "num_hidden_layers": 24}}
    config["data"] = {"seq_len": 2048}
    found = plait.estimate(config, f"{pipeline} mb8 precision:bf16", cluster)
    assert sum(found.breakdown.as_dict().values()) == pytest.approx(found.step_seconds)


def test_shares_follow_speed_and_are_the_best_of_all():
    plan = "dp16:zero1 precision:bf16"
    seconds = {}
    for own in range(1, 8):
        shares = [own] * 8 + [8 - own] * 8
        config = with_plan(shares=shares)
        seconds[own] = plait.estimate(config, plan, MIXED).step_seconds
    fastest = min(seconds, key=seconds.get)
    assert fastest > 4 and seconds[fastest] < 0.8 * seconds[4]
    found = [
        one
        for one in choose_mixed(CONFIG, MIXED, top=200)
        if one.shares and one.plan.dp.size == 16 and one.plan.micro_batches == 1
    ]
    assert found and found[0].step_seconds <= seconds[fastest] * (1 + 1e-9)


def test_layers_follow_speed_and_the_prediction_is_that_of_the_counts():
    plan = "pp2:1f1b dp8:zero1 mb8 precision:bf16"
    even = plait.estimate(with_plan(counts=[8, 8]), plan, MIXED)
    uneven = plait.estimate(with_plan(counts=[11, 5]), plan, MIXED)
    backwards = plait.estimate(with_plan(counts=[5, 11]), plan, MIXED)
    assert uneven.step_seconds < even.step_seconds < backwards.step_seconds
    assert uneven.counts == (11, 5) and uneven.as_dict()["counts"] == [11, 5]


def test_equal_kinds_are_the_plain_prediction():
    for text in ("dp16:zero1 mb2 precision:bf16", "pp2:1f1b dp8:zero1 mb8 precision:bf16"):
        plain = plait.estimate(CONFIG, text, "h100x16")
        mixed = plait.estimate(CONFIG, text, "h100x8+h100x8")
        assert mixed.step_seconds == pytest.approx(plain.step_seconds, rel=1e-12)
        assert mixed.memory == plain.memory and mixed.tokens == plain.tokens
        assert mixed.model_flops == pytest.approx(plain.model_flops)
        assert mixed.cost_per_million_tokens == pytest.approx(plain.cost_per_million_tokens)


def test_counts_are_planned_on_one_kind_too():
    plan = "pp2:1f1b dp4:zero1 mb8 precision:bf16"
    even = plait.estimate(with_plan(counts=[8, 8]), plan, "h100x8")
    uneven = plait.estimate(with_plan(counts=[12, 4]), plan, "h100x8")
    assert uneven.step_seconds > 1.15 * even.step_seconds
    with pytest.raises(PlanError, match="16 layers, and 18 with embedding and head"):
        plait.estimate(with_plan(counts=[12, 5]), plan, "h100x8")


def test_the_division_is_the_best_of_all_divisions():
    seconds = [[0.2, 1.0, 1.0, 1.1, 0.9, 1.0, 1.0, 0.5], [0.4, 2.5, 2.5, 2.7, 2.2, 2.5, 2.5, 1.2]]
    kinds = [0, 1, 0]

    def slowest(counts):
        parts = []
        start = 1
        for stage, (count, kind) in enumerate(zip(counts, kinds, strict=True)):
            spent = sum(seconds[kind][start : start + count])
            spent += seconds[kind][0] if stage == 0 else 0.0
            spent += seconds[kind][-1] if stage == 2 else 0.0
            parts.append(spent)
            start += count
        return max(parts)

    every = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    assert slowest(_divided(seconds, kinds)) == pytest.approx(min(map(slowest, every)))


def test_a_network_is_as_slow_as_its_slowest_part():
    mixed = MixedCluster.parse("h100x8+v100-32gbx8")
    rates = {part.network.bandwidth for part in mixed.parts}
    assert rates == {plait.Cluster.parse("v100-32gb").network.bandwidth}
    assert mixed.num_devices == 16 and mixed.kinds(4) == [0, 0, 1, 1] and mixed.kinds(16) is None


def test_what_is_refused():
    with pytest.raises(ClusterError, match="3 parts"):
        choose_mixed(CONFIG, "h100x8+a100-80gbx8+l40sx8")
    with pytest.raises(WorldSizeError, match="16 devices"):
        plait.estimate(CONFIG, "dp8", MIXED)
    with pytest.raises(PlanError, match="two kinds"):
        plait.estimate(CONFIG, "dp1 tp16:1d", MIXED)


def answer(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_verbs(capsys, tmp_path):
    path = tmp_path / "run.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in CONFIG["model"].items()]
    text = "[model]\n" + "\n".join(lines)
    path.write_text(f"{text}\n[data]\nseq_len = 4096\n[train]\nglobal_batch = 64\n")
    code, data = answer(capsys, "plan", str(path), "--cluster", MIXED, "--top", "3")
    assert code == 0 and len(data["plans"]) == 3
    first = data["plans"][0]
    key = "shares" if "shares" in first else "counts"
    code, again = answer(
        capsys,
        "estimate",
        str(path),
        "--cluster",
        MIXED,
        "--plan",
        first["plan"],
        "--set",
        f"plan.{key}={first[key]}",
    )
    assert code == 0 and again["step_seconds"] == pytest.approx(first["step_seconds"])
    assert main(["plan", str(path), "--cluster", MIXED]) == 0
    assert f"[plan] {key} = " in capsys.readouterr().out
    code, data = answer(capsys, "plan", str(path), "--cluster", MIXED, "--fix", "tp2")
    assert code == 2 and "--fix is of one kind" in data["error"]
    code, data = answer(capsys, "plan", str(path), "--cluster", "h100x8+local")
    assert code == 2


def test_an_estimate_without_shares_has_no_such_keys():
    guess = plait.estimate(CONFIG, "dp8:zero1", "h100x8")
    assert not {"shares", "counts"} & set(guess.as_dict()) and guess == replace(guess)
