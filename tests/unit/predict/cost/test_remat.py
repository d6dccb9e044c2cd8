"""`remat:auto`: the program against all assignments, and the estimate of what it chooses."""

import random
from itertools import product

import pytest

import plait
from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.axes import REMATS
from plait.predict.cost import describe
from plait.predict.cost.remat.dynamic import MemoryBudget, Option, choose

GIB = 2.0**30
GPT = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
        "vocab_size": 50304,
    },
    "data": {"name": "random", "seq_len": 2048},
    "train": {"global_batch": 64},
}
EXPERTS = {
    **GPT,
    "model": {
        **GPT["model"],
        "name": "llama",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 6,
    },
}


def drawn(seed, number, kinds):
    """Blocks of so many kinds, each with three options of differing costs, and a room."""
    draw = random.Random(seed)
    whole = [draw.randint(20, 400) for _ in range(kinds)]
    options = [
        (
            Option(kept, 0.0),
            Option(draw.randint(0, kept), draw.uniform(0.1, 2.0), draw.choice((kept, 90))),
            Option(draw.randint(0, kept // 2), draw.uniform(0.1, 4.0), kept),
        )
        for kept in whole
    ]
    blocks = [options[draw.randrange(kinds)] for _ in range(number)]
    most = sum(block[0].kept_bytes for block in blocks)
    room = MemoryBudget(
        draw.uniform(0.2, 1.3) * most,
        draw.choice((1.0, 1.04, 1.25)),
        draw.choice((1.0, 1.25)),
        draw.choice((0.0, 60.0)),
    )
    return blocks, room


def cost(blocks, room, chosen):
    """Bytes and seconds of an assignment."""
    taken = [options[index] for options, index in zip(blocks, chosen, strict=True)]
    working = max(option.working_bytes for option in taken)
    return room.needed(sum(option.kept_bytes for option in taken), working), sum(
        option.seconds for option in taken
    )


def all_costs(blocks, room):
    return [cost(blocks, room, one) for one in product(range(3), repeat=len(blocks))]


@pytest.mark.parametrize("seed", range(120))
def test_no_assignment_is_faster_within_the_memory(seed):
    blocks, room = drawn(seed, 1 + seed % 8, 1 + seed % 5)
    found = choose(blocks, room)
    needed, seconds = cost(blocks, room, found.options)
    within = [spent for bytes_, spent in all_costs(blocks, room) if bytes_ <= room.limit_bytes]
    assert found.fits == bool(within)
    if within:
        assert needed <= room.limit_bytes
        assert seconds == pytest.approx(min(within), rel=1e-12)
    else:
        assert needed == min(bytes_ for bytes_, _ in all_costs(blocks, room))


@pytest.mark.parametrize("seed", range(40))
def test_few_states_lose_no_more_than_a_cell_a_block(seed):
    number, states = 8, 24
    blocks, room = drawn(seed, number, number)
    room = MemoryBudget(room.limit_bytes)
    blocks = [tuple(Option(one.kept_bytes, one.seconds) for one in own) for own in blocks]
    found = choose(blocks, room, states)
    needed, seconds = cost(blocks, room, found.options)
    least = sum(min(one.kept_bytes for one in own) for own in blocks)
    spare = int(room.limit_bytes) - least
    if spare < 0:
        assert not found.fits
        return
    cell = -(-(spare + 1) // states)
    smaller = room.limit_bytes - number * cell
    within = [spent for bytes_, spent in all_costs(blocks, room) if bytes_ <= smaller]
    assert needed <= room.limit_bytes
    assert seconds <= min(within, default=float("inf")) + 1e-12


def test_first_of_equal_blocks_recompute():
    block = (Option(10, 0.0), Option(4, 1.0), Option(1, 3.0))
    found = choose([block] * 4, MemoryBudget(30.0))
    assert list(found.options) == sorted(found.options, reverse=True)


def test_many_different_blocks_have_a_choice():
    blocks, _ = drawn(3, 24, 24)
    half = sum(options[0].kept_bytes for options in blocks) / 2
    assert choose(blocks, MemoryBudget(half + 400)).fits


@pytest.mark.parametrize("config", [GPT, EXPERTS], ids=["gpt", "experts"])
@pytest.mark.parametrize(
    "text",
    [
        "dp8:zero3",
        "dp8:zero1 mb2",
        "pp4:1f1b dp2:zero1 mb8",
        "pp4:interleaved,v2 dp2:zero1 mb8",
        "tp4:1d,sp dp2:zero1",
        "dp8:zero3 compile",
    ],
)
def test_choice_is_no_slower_than_a_word_for_all_that_fits(config, text):
    for cluster in ("a100-40gbx8", "a100-80gbx8"):
        alike = {
            word: plait.estimate(config, f"{text} remat:{word} precision:bf16", cluster)
            for word in REMATS
            if not (word == "selective" and "compile" in text)
        }
        auto = plait.estimate(config, f"{text} remat:auto precision:bf16", cluster)
        fitting = [one for one in alike.values() if one.fits]
        assert auto.fits == bool(fitting)
        assert len(auto.remat) == 24
        if fitting:
            assert auto.step_seconds <= min(one.step_seconds for one in fitting) * (1 + 1e-9)
            assert auto.memory.total <= auto.memory_limit
        else:
            assert auto.memory.total <= min(one.memory.total for one in alike.values()) * 1.001


@pytest.mark.parametrize("word", REMATS)
@pytest.mark.parametrize("text", ["dp8:zero3", "pp4:1f1b dp2:zero1 mb8", "tp4:1d,sp dp2:zero1"])
def test_equal_words_are_predicted_as_the_word_for_all(word, text):
    given = {**GPT, "plan": {"remat": [word] * 24}}
    chosen = plait.estimate(given, f"{text} remat:auto precision:bf16", "a100-40gbx8")
    alike = plait.estimate(GPT, f"{text} remat:{word} precision:bf16", "a100-40gbx8")
    assert chosen.step_seconds == pytest.approx(alike.step_seconds, rel=1e-12)
    assert chosen.memory.total == pytest.approx(alike.memory.total, rel=1e-12)
    assert chosen.traffic == alike.traffic


def test_ample_memory_keeps_everything_and_too_little_says_so():
    ample = plait.estimate(GPT, "dp8:zero3 mb8 remat:auto precision:bf16", "h200x8")
    assert set(ample.remat) == {"none"}
    small = plait.estimate(GPT, "dp8 remat:auto", "v100-16gbx8")
    full = plait.estimate(GPT, "dp8 remat:full", "v100-16gbx8")
    assert not small.fits
    assert set(small.remat) == {"full"}
    assert small.memory.total == pytest.approx(full.memory.total, rel=1e-12)


def test_a_stage_without_blocks_that_does_not_fit_is_an_answer():
    assert choose((), MemoryBudget(-1.0)).options == ()
    wide = {**GPT, "model": {**GPT["model"], "num_hidden_layers": 5, "vocab_size": 150_000}}
    guess = plait.estimate(wide, "pp4 remat:auto precision:bf16", "rtx4090x4")
    assert not guess.fits and len(guess.remat) == 5


def test_stages_choose_for_their_own_live_micro_batches():
    """The first stage of 1f1b has most micro-batches alive, so it recomputes most."""
    found = plait.estimate(
        GPT, "pp4:1f1b dp2:zero1 mb8 remat:auto precision:bf16", "v100-16gbx8"
    ).remat
    recomputed = [sum(word != "none" for word in found[at : at + 6]) for at in range(0, 24, 6)]
    assert recomputed[0] > 0
    assert recomputed == sorted(recomputed, reverse=True)


def test_choice_is_in_the_answer_and_is_the_same_again():
    first = plait.estimate(GPT, "dp8:zero3 remat:auto precision:bf16", "a100-40gbx8")
    again = plait.estimate(GPT, "dp8:zero3 remat:auto precision:bf16", "a100-40gbx8")
    assert first.as_dict()["remat"] == list(again.remat)
    assert "remat" not in plait.estimate(GPT, "dp8:zero3", "a100-40gbx8").as_dict()


def test_words_must_be_as_many_as_blocks():
    with pytest.raises(PlanError, match=r"plan\.remat has 2 words and the model 24 blocks"):
        plait.estimate({**GPT, "plan": {"remat": ["full"] * 2}}, "dp8 remat:auto", "h100x8")


def test_two_kinds_of_device_are_refused():
    with pytest.raises(PlanError, match="remat:auto chooses for one kind of device"):
        plait.estimate(GPT, "dp4 remat:auto", "h100x2+a100-80gbx2")


def test_text_round_trips():
    assert str(Plan.parse("remat:auto dp2")) == "dp2 remat:auto"
    assert describe(GPT["model"]).num_repeated == 24
