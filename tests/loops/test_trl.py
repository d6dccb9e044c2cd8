"""TRL's SFTTrainer under plans: the losses and norms of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.comm import World
from plait.errors import ModelError, PlanError
from plait.plan import Plan
from tests.loops import gpt2
from tests.loops.five_loops import model_of
from tests.loops.test_transformers import same

pytest.importorskip("transformers")
pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore")  # what the library says of its own


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<pad>": 1, **{f"w{index}": index for index in range(2, 32)}}
    made = Tokenizer(WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def texts() -> Any:
    """Rows of 3 to 8 words, after a prompt whose words are not learnt."""
    import datasets

    rows = [row["input_ids"].tolist() for row in gpt2.samples()]
    words = [
        [f"w{max(2, token)}" for token in row[: 3 + index % 6]] for index, row in enumerate(rows)
    ]
    parts = {"prompt": [" ".join(row[:2]) for row in words]}
    parts["completion"] = [" " + " ".join(row[2:]) for row in words]
    return datasets.Dataset.from_dict(parts)


def settings(out: str, dp: int, **others: Any) -> Any:
    from trl import SFTConfig

    told = {"bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True, **others}
    return SFTConfig(
        output_dir=out,
        per_device_train_batch_size=8 // dp,
        max_steps=10,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        save_strategy="no",
        **told,
    )


def run(world: World | None, out: str, plan: str) -> Any:
    import transformers
    import trl

    transformers.logging.set_verbosity_error()
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    dp = 1 if world is None else world.axis("dp").size
    with gpt2.as_rank(rank, size), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts: dict[str, Any] = {"model": gpt2.model(), "args": settings(f"{out}{rank}", dp)}
        parts |= {"train_dataset": texts(), "processing_class": tokenizer()}
        trainer: Any
        if plan:
            from plait.loops.trl import SFTTrainer

            trainer = SFTTrainer(**parts, plan=plan)
        else:
            trainer = trl.SFTTrainer(**parts)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [[one[key] for key in ("loss", "grad_norm", "learning_rate")] for one in logs]


def test_ten_steps_are_those_of_one_device(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    wanted = run(None, str(tmp_path / "one"), "")
    assert len(wanted) == 10
    plan = "pp2 tp2 dp2:zero1"
    for found in ranks(8, run, str(tmp_path / "eight"), plan, plan=plan):
        same(found, wanted)


def routers(world: World, out: str) -> str:
    """TRL adds a loss of the routers unless it is told not to."""
    from plait.loops.trl import SFTTrainer

    with gpt2.as_rank(0, 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = settings(out, 1)
        parts: dict[str, Any] = {"train_dataset": texts(), "processing_class": tokenizer()}
        with pytest.raises(ModelError) as refused:
            SFTTrainer(model_of("mixtral"), told, plan="dp1", **parts)
        return str(refused.value)


def test_a_loss_of_routers_is_refused(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (sentence,) = ranks(1, routers, str(tmp_path))
    assert "its loss has a part of all routers' logits" in sentence
    assert "SFTConfig(router_aux_loss_coef=0.0)" in sentence


@pytest.mark.parametrize(
    ("plan", "parts"),
    [("dp2", 1), ("cp2:ring", 4), ("cp2:ulysses", 2), ("tp3:1d,sp", 3), ("tp2", 1)],
)
def test_rows_are_padded_to_what_a_plan_can_cut(plan: str, parts: int) -> None:
    from plait.loops.trl import parts_of_sequence

    assert parts_of_sequence(Plan.parse(plan)) == parts


def test_what_a_plan_cannot_be_joined_with_is_said(tmp_path: Path) -> None:
    from plait.loops import trl

    with pytest.raises(PlanError, match="DPOTrainer compares outputs"):
        trl.DPOTrainer  # noqa: B018  # asked for is refused
    for others in ({"packing": True}, {"padding_free": True}, {"loss_type": "dft"}):
        with pytest.raises(PlanError, match=next(iter(others))):
            trl.SFTTrainer(gpt2.model(), settings(str(tmp_path), 1, **others), plan="dp1")
