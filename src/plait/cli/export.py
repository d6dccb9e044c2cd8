"""`plait export`: a plan in the words of another framework, or a checkpoint as Hugging Face
safetensors.

Settings that another framework cannot express are listed, never left out in silence. The exit code
is 1 when the rest is no longer the plan, since its ranks would be other ones.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.answer import Answer, Json, write_text
from plait.cli.parser import UsageError
from plait.toml import is_file
from plait.values import JsonMapping

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from plait.plan import Plan

DTYPES = ("float32", "bfloat16", "float16")
HUGGING_FACE = (None, "huggingface", "hugging-face", "hf", "safetensors")
OTHER_FORMS = ("torch", "dcp")
"""Forms of a checkpoint beside safetensors: a file of `torch.save`, and a DCP folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait export`."""
    parser.add_argument("what", metavar="plan|checkpoint", help="what is exported")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="plan: its text, or a CONFIG whose [plan] is meant; checkpoint: a run's folder",
    )
    parser.add_argument(
        "--to",
        metavar="NAME",
        help="plan: megatron-lm, deepspeed or torchtitan; checkpoint: huggingface (the default), "
        "torch (one file of torch.save) or dcp (a folder of torch.distributed.checkpoint)",
    )
    parser.add_argument("--plan", metavar="TEXT", help="the plan, instead of the CONFIG's")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples a step (default: the CONFIG's, else dp x mb)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="where to write (plan: default stdout; checkpoint: needed)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="checkpoint of adapters: add them to the whole model"
    )
    parser.add_argument(
        "--shard-gb",
        type=float,
        metavar="N",
        help="checkpoint: the largest file, in 10^9 bytes (default: 5)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="checkpoint: convert the weights (default: as they are)"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Export one or the other; `plait export TEXT --to NAME` means a plan.

    Raises:
        UsageError: neither a plan nor a checkpoint is named.
    """
    if arguments.what == "checkpoint":
        return _checkpoint(arguments)
    if arguments.what != "plan":
        if arguments.source is not None:
            raise UsageError(
                f"'{arguments.what}' cannot be exported; write plait export plan ... or plait "
                "export checkpoint ..."
            )
        _require_plan(arguments.what)
        arguments.source = arguments.what
    return _plan(arguments)


def _require_plan(word: str) -> None:
    """Errors: `UsageError` for one word that is neither the text of a plan nor a config."""
    from plait.errors import PlanError
    from plait.plan import Plan

    if Path(word).is_dir():
        raise UsageError(
            f"'{word}' is a folder; for its weights write plait export checkpoint "
            f"{shlex.quote(word)} --out DIR"
        )
    if is_file(word):
        return
    try:
        Plan.parse(word)
    except PlanError as error:
        raise UsageError(
            f"'{word}' is neither a plan nor the file of a config ({error}); write plait export "
            "plan TEXT --to NAME, or plait export checkpoint RUN_DIR --out DIR"
        ) from None


def _plan(arguments: argparse.Namespace) -> Answer:
    from plait.predict.planner.export import EXPORTERS, export_plan
    from plait.predict.planner.export_section import with_section

    if arguments.to is None:
        raise UsageError(f"say for which framework: --to {', '.join(EXPORTERS)}")
    if arguments.dtype is not None:
        raise UsageError("--dtype belongs to a checkpoint; a plan says precision:bf16")
    for option in ("merge", "shard_gb"):
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')} belongs to a checkpoint, not to a plan")
    plan, batch, tables = _plan_and_batch(arguments)
    exported = with_section(export_plan(plan, arguments.to, batch), plan, tables)
    text = exported.text if exported.text.endswith("\n") else f"{exported.text}\n"
    if arguments.out is not None:
        write_text(arguments.out, text)
    out = None if arguments.out is None else str(arguments.out)
    data = {"plan": str(plan), "out": out, **exported.as_dict()}
    return Answer(data, partial(_plan_view, data), ok=not exported.other_ranks)


def _plan_and_batch(arguments: argparse.Namespace) -> tuple[Plan, int | None, JsonMapping]:
    """The plan that is meant, its samples a step, and the tables of the config, if there is one.
    Errors: those of the plan's text and of the config.
    """
    from plait.plan import Plan
    from plait.predict.cost.model.tables import config_tables

    source = arguments.source
    text = arguments.plan
    batch = arguments.global_batch
    tables: JsonMapping = {}
    if source is not None and (source.endswith((".toml", ".json")) or is_file(source)):
        tables = config_tables(source, with_model=False)
        text = text if text is not None else tables.get("plan", {}).get("text")
        batch = batch or tables.get("train", {}).get("global_batch")
        if text is None or text.strip() == "auto":
            raise UsageError(
                f"{source} names no plan; write --plan TEXT (plait plan {source} finds the best)"
            )
    elif source is not None:
        if text is not None:
            raise UsageError(f"two plans are given, '{source}' and --plan '{text}'")
        text = source
    elif text is None:
        raise UsageError(
            "say which plan: plait export plan 'tp2:1d,sp dp4:zero1' --to megatron-lm, or a CONFIG "
            "with [plan]"
        )
    if batch is not None and batch < 1:
        raise UsageError(f"--global-batch is {batch}; a step has one sample or more")
    return Plan.parse(text), None if batch is None else int(batch), tables


def _checkpoint(arguments: argparse.Namespace) -> Answer:
    if arguments.to not in {*HUGGING_FACE, *OTHER_FORMS}:
        raise UsageError(
            f"a checkpoint is exported to huggingface (safetensors), torch or dcp, not to "
            f"'{arguments.to}'"
        )
    if arguments.to in OTHER_FORMS and arguments.shard_gb is not None:
        raise UsageError(f"--shard-gb belongs to safetensors; --to {arguments.to} has no shards")
    for option in ("plan", "global_batch"):
        if getattr(arguments, option) is not None:
            raise UsageError(
                f"--{option.replace('_', '-')} belongs to a plan; a checkpoint is whole whatever "
                "its plan was"
            )
    if arguments.source is None or arguments.out is None:
        raise UsageError("say what and where: plait export checkpoint RUN_DIR --out DIR")
    import torch

    from plait.checkpoint import resolve
    from plait.checkpoint.folder import LATEST
    from plait.checkpoint.hugging_face import export_model
    from plait.run.rundir import is_word, latest_run

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    source = Path(arguments.source)
    source = resolve(latest_run() if is_word(source, LATEST) else source)
    limit = _shard_bytes(arguments.shard_gb)
    if arguments.to in OTHER_FORMS:
        return _other_form(source, arguments.to, arguments.out, dtype, arguments.merge)
    if arguments.merge:
        files, names = _merged(source, arguments.out, dtype, limit)
    else:
        tables = _library_files(source)
        files, names = export_model(source, arguments.out, dtype, tables, max_shard_bytes=limit)
    files = [*files, *_carried(source, arguments.out)]
    data = {
        "out": str(arguments.out),
        "files": [str(file) for file in files],
        "num_tensors": len(names),
        "names": names,
    }
    view = f"{len(names)} tensors written to {', '.join(map(str, files))}"
    return Answer(data, view)


def _other_form(
    source: Path, form: str, out: Path, dtype: torch.dtype | None, merge: bool
) -> Answer:
    """Write the weights as a file of `torch.save`, or as a distributed checkpoint.

    They are those of the safetensors, under the same names. All are in memory at once.
    Errors: `UsageError` for a place that is taken or cannot be written.
    """
    import tempfile

    from safetensors.torch import load_file

    from plait.checkpoint.elsewhere import write_dcp, write_torch
    from plait.checkpoint.hugging_face import export_model

    if out.exists() and (form == "dcp" or out.is_dir()):
        raise UsageError(f"{out} is there already; name a place that is not")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as name:
            folder = Path(name) / "weights"
            if merge:
                _merged(source, folder, dtype, _shard_bytes(None))
            else:
                export_model(source, folder, dtype, _library_files(source))
            weights: dict[str, torch.Tensor] = {}
            for file in sorted(folder.glob("*.safetensors")):
                weights |= load_file(file)
        write = {"torch": write_torch, "dcp": write_dcp}[form]
        write(weights, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    data = {
        "out": str(out),
        "files": [str(file) for file in files],
        "num_tensors": len(weights),
        "names": {name: name for name in weights},
    }
    return Answer(data, f"{len(weights)} tensors written to {out}")


def _shard_bytes(gigabytes: float | None) -> int:
    """The largest size of a file."""
    from plait.checkpoint.export import MAX_SHARD_BYTES

    if gigabytes is None:
        return MAX_SHARD_BYTES
    if not gigabytes > 0:
        raise UsageError(f"--shard-gb is {gigabytes:g}; a file has more than 0 bytes")
    return max(1, round(gigabytes * 1e9))


def _merged(
    checkpoint: Path, out: Path, dtype: torch.dtype | None, limit: int
) -> tuple[list[Path], dict[str, str]]:
    """Write the model of a run with its adapters in the weights, made on this one device."""
    from plait.checkpoint.hugging_face import ADAPTER, library_names, with_joined
    from plait.checkpoint.read import Checkpoint
    from plait.config import load
    from plait.engine.build import join_world
    from plait.engine.state.pretrained import save_pretrained
    from plait.plan import Plan
    from plait.run.assemble import assemble
    from plait.run.rundir import RunFolder

    if ADAPTER not in Checkpoint.open(checkpoint).meta:
        raise UsageError(f"{checkpoint} holds no adapters to merge; leave --merge out")
    config = RunFolder.of(checkpoint).config
    if not config.is_file():
        raise UsageError(
            f"{checkpoint} holds adapters alone, and {config} is missing, which names their base"
        )
    alone = Plan.parse("dp1")
    engine = assemble(load(config), alone, join_world(alone)).engine
    engine.load(checkpoint)
    tables = _library_files(checkpoint)
    files = save_pretrained(
        engine, out, dtype=dtype, max_shard_bytes=limit, merge=True, tables=tables
    )
    weights = [name for name, param in engine.model.named_parameters() if not param.requires_grad]
    return files, with_joined(*library_names(weights, tables))


def _carried(checkpoint: Path, out: Path) -> list[Path]:
    """Copy the files of the tokenizer from beside the weights, or the config, of a run's model."""
    from plait.config import load
    from plait.models.hf import is_path
    from plait.models.hf_files import tokenizer_files
    from plait.run.rundir import RunFolder

    config = RunFolder.of(checkpoint).config
    if out.suffix == ".safetensors" or not config.is_file():
        return []
    keys = load(config).model.keys_for_factory()
    folders = [Path(keys[key]) for key in ("weights", "config") if is_path(keys.get(key))]
    copied = []
    for source in tokenizer_files(folders if keys.get("name") == "hf" else []):
        target = out / source.name
        if not target.exists():
            shutil.copyfile(source, target)
            copied.append(target)
    return copied


def _library_files(checkpoint: Path) -> Json | None:
    """The files of a Hugging Face model, or of plait's GPT or Llama, by the config of its run."""
    from plait.checkpoint import gpt2
    from plait.checkpoint.hugging_face import llama_tables
    from plait.config import load
    from plait.models.hf import files_of, make
    from plait.run.rundir import RunFolder

    config = RunFolder.of(checkpoint).config
    if not config.is_file():
        return None
    keys = load(config).model.keys_for_factory()
    name = keys.pop("name", None)
    if name == "llama":
        return llama_tables(keys)
    if name == "gpt":
        return gpt2.tables(keys)
    if name != "hf":
        return None
    return files_of(make(**keys))


def _plan_view(data: Json) -> RenderableType:
    from rich.text import Text

    lines = [f"# {data['framework']} cannot express: {line}" for line in data["missing"]]
    body = data["text"].rstrip("\n") if data["out"] is None else f"written to {data['out']}"
    return Text("\n".join([body, *lines]))
