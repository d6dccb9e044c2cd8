"""Rules for the values of an index. Its checksum finds accidents; these rules find the rest.

Each rule yields sentences about what is wrong. A step below 0, an impossible shape or a name that
leads out of the folder must not reach an engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from plait.values import JsonMapping, JsonValue

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""The types that are saved, by torch's names, and the bytes of one element."""

MAX_DIMS = 64
MAX_STEP = 1 << 53


def first_fault(index: JsonMapping, step: int | None) -> str | None:
    """The first thing that is wrong; None for a sound index. `step` is that of the folder's name,
    where it has one.
    """
    for rule in (_sections, _meta, _files, _tensors):
        for fault in rule(index):
            return fault
    saved = index["meta"].get("step")
    if step is not None and saved is not None and saved != step:
        return f"meta.step is {saved} and the folder is named for step {step}"
    return None


def is_count(value: JsonValue, least: int = 0) -> bool:
    """Whether a value is a whole number of at least `least`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_shape(value: JsonValue) -> bool:
    """Whether a value is a list of whole numbers of 0 or more."""
    return isinstance(value, list) and all(is_count(size) for size in value)


def _sections(index: JsonMapping) -> Iterator[str]:
    for name, kind, word in (("meta", dict, "table"), ("files", list, "list")):
        if not isinstance(index.get(name), kind):
            yield f"'{name}' is not a {word}"
    if not isinstance(index.get("tensors"), dict):
        yield "'tensors' is not a table"


def _meta(index: JsonMapping) -> Iterator[str]:
    meta = index["meta"]
    if "step" in meta and not (is_count(meta["step"]) and meta["step"] < MAX_STEP):
        yield f"meta.step is {meta['step']!r}, and a step is a whole number of 0 or more"
    for key in ("plan", "optimizer"):
        if not isinstance(meta.get(key, ""), str):
            yield f"meta.{key} is {meta[key]!r}, and must be a text"


def _files(index: JsonMapping) -> Iterator[str]:
    seen: set[str] = set()
    for number, file in enumerate(index["files"]):
        where = f"files[{number}]"
        if not isinstance(file, dict):
            yield f"{where} is not a table"
            return
        name = file.get("name")
        if not isinstance(name, str) or not name or name != name.replace("\\", "/").split("/")[-1]:
            yield f"{where}.name is {name!r}, and must be the name of a file in this folder"
            return
        if name in seen:
            yield f"{where}.name {name!r} stands there twice"
        seen.add(name)
        if not is_count(file.get("size_bytes"), 1):
            yield f"{where}.size_bytes is {file.get('size_bytes')!r}"
        if not (is_count(file.get("checksum")) and file["checksum"] < 1 << 32):
            yield f"{where}.checksum is {file.get('checksum')!r}"


def _tensors(index: JsonMapping) -> Iterator[str]:
    sizes = [file["size_bytes"] for file in index["files"]]
    for name, tensor in index["tensors"].items():
        where = f"tensor '{name}'"
        if not isinstance(tensor, dict):
            yield f"{where} is not a table"
            return
        shape = tensor.get("shape")
        files = tensor.get("files")
        if not isinstance(shape, list) or not is_shape(shape):
            yield f"{where} has the shape {shape!r}"
        elif len(shape) > MAX_DIMS:
            yield f"{where} has {len(shape)} dims"
        elif not isinstance(tensor.get("dtype"), str) or tensor["dtype"] not in ITEM_BYTES:
            yield f"{where} has the type {tensor.get('dtype')!r}"
        elif not isinstance(files, list) or not _are_indices(files, len(sizes)):
            yield f"{where} lies in files {files!r}, and there are {len(sizes)}"
        else:
            needed = math.prod(shape) * ITEM_BYTES[tensor["dtype"]]
            there = sum(sizes[at] for at in files)
            if needed > there:
                yield f"{where} of shape {shape} has {needed:,} bytes and its files {there:,}"


def _are_indices(files: list[JsonValue], count: int) -> bool:
    """Whether these are places in a list of so many files, at least one, each once."""
    sound = all(is_count(at) and at < count for at in files)
    return sound and bool(files) and len(set(files)) == len(files)
