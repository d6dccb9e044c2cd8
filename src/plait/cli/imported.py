"""`plait import`: the config of another framework as a plan and a config, with a word on
every key.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.answer import Answer, write_text
from plait.cli.parser import UsageError
from plait.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.interop import Imported

WEIGHTS = (".pt", ".pth", ".bin")
"""Endings of files that `torch.save` has written."""

FRAMEWORK_NAMES = "deepspeed|megatron-lm|torchtitan|accelerate|axolotl|llama-factory|nanotron|nemo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait import`."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="the config (JSON, YAML, TOML), a script with Megatron-LM's command line, or a "
        "checkpoint: a DCP folder, DeepSpeed's ZeRO-3 folder, a .pt file of torch.save",
    )
    parser.add_argument(
        "--from",
        dest="framework",
        metavar="NAME",
        help=f"{FRAMEWORK_NAMES.replace('|', ', ')} (default: found from the keys of the file)",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="the number of ranks, where the file does not say it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml|FOLDER",
        help="write the config there (default: stdout), or a checkpoint's weights as safetensors",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Import. Errors: `ConfigError` for a file that cannot be read or contradicts itself.

    Raises:
        UsageError: fewer ranks than one.
        ConfigError: a value that no config may have.
    """
    from plait.config.read import wrong_values
    from plait.interop import import_file
    from plait.toml import write_toml

    if arguments.gpus is not None and arguments.gpus < 1:
        raise UsageError(f"--gpus is {arguments.gpus}; a run has one rank or more")
    path = Path(arguments.file)
    if path.is_dir() or path.suffix in WEIGHTS:
        return _import_weights(path, arguments.out)
    imported = import_file(arguments.file, arguments.framework, arguments.gpus)
    wrong = wrong_values(imported.config)
    if wrong:
        raise ConfigError(f"{path} means what no config can say: {'; '.join(wrong)}")
    text = write_toml(imported.config)
    if arguments.out is not None:
        write_text(arguments.out, text)
    data = imported.as_dict()
    data["out"] = None if arguments.out is None else str(arguments.out)
    return Answer(data, view(imported, text, arguments.out))


def _import_weights(path: Path, out: Path | None) -> Answer:
    """Write a checkpoint's weights as safetensors. Errors: `CheckpointError`."""
    from rich.text import Text
    from safetensors.torch import save_file

    from plait.checkpoint.elsewhere import check_folder, read_elsewhere

    check_folder(path)
    if out is None:
        raise UsageError(f"{path} is a checkpoint; say --out FOLDER, where its weights are written")
    kind, weights = read_elsewhere(path)
    file = out / "model.safetensors"
    try:
        out.mkdir(parents=True, exist_ok=True)
        own = {name: value.contiguous().clone() for name, value in weights.items()}
        save_file(own, file, metadata={"format": "pt"})
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from None
    data = {"framework": kind, "tensors": len(weights), "out": str(file)}
    return Answer(data, Text(f"{len(weights)} tensors of {path} ({kind}) are in {file}"))


def view(imported: Imported, text: str, out: Path | None) -> RenderableType:
    """The config as TOML, and each unmapped key as a comment below it."""
    from rich.text import Text

    lines = [f"# from {imported.framework}: {len(imported.mapped)} keys mapped"]
    lines += [text.rstrip("\n")] if out is None else [f"# written to {out}"]
    lines += [f"# plan: {imported.plan}"]
    lines += [f"# assumed: {sentence}" for sentence in imported.assumed]
    for item in imported.unmapped:
        lines.append(f"# {item.kind}: {item.key} = {item.value!r}: {item.reason}")
    return Text("\n".join(lines))
