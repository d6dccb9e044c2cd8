"""Cluster texts: `h100`, `h100x64`, the path of a file, `local`.

A file is TOML, or what `plait probe --out FILE` has measured.

A preset without a count is one of its usual nodes. A file starts from `[device] preset` when it
names one and overrides any number. So two lines describe a machine that differs in one number.
What was measured beside that number (the rate of two devices alone, the best product) is scaled
with it.
Numbers are in their usual units: bandwidth of memory and node in gigabytes a second, of the network
in gigabits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from plait.cluster.bounds import MOST_DEVICES, number_faults
from plait.cluster.build import BOUNDS, DEFAULTS, build, faults, settings_of
from plait.cluster.calibration import CALIBRATION_BOUNDS, calibration_of
from plait.cluster.hardware import Hardware
from plait.cluster.local import hardware_of_probe
from plait.cluster.local import probe_path as default_probe_path
from plait.cluster.presets import PRESETS, Preset
from plait.errors import ClusterError, nearest
from plait.toml import is_file, is_folder, parse_json, read_toml
from plait.values import JsonMapping, JsonObject, JsonValue

WIDE: Final = ("bf16", "float32", "float64")
SECTIONS: Final = frozenset(key.partition(".")[0] for key in BOUNDS if "." in key)
_held: Final[dict[Path, JsonObject]] = {}
"""The measurements of this process, by the file that could not keep them."""
PRECISIONS: Final = (*WIDE, "fp8", "mxfp8", "nvfp4")


def parse_cluster(text: str, probe_path: str | Path | None = None) -> Hardware:
    """The hardware of `Cluster.parse`.

    Raises:
        ClusterError: no text, an unknown preset, or no number of devices.
    """
    if not isinstance(text, str) or not text.strip():
        raise ClusterError(
            f"a cluster is PRESETxCOUNT, the path of a TOML file, or local, not {text!r}"
        )
    text = text.strip()
    if text == "local":
        return hardware_of_probe(read_probe(probe_path))
    if _is_measured(text):
        return _hardware_of_measured(text)
    if text.endswith(".toml") or "/" in text or is_file(text):
        return hardware_of_tables(text, read_toml(text, ClusterError))
    name = text
    count = None
    if name not in PRESETS and "x" in name:
        name, _, digits = text.rpartition("x")
        if name in PRESETS and not re.fullmatch("[0-9]{1,9}", digits):
            limit = f" from 1 to {MOST_DEVICES:,}" if digits.isdigit() else ""
            raise ClusterError(
                f"cluster '{text}': '{digits}' is no number of devices{limit}; write {name}x8 for "
                "eight"
            )
        count = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
    if name not in PRESETS:
        if is_folder(text):
            raise ClusterError(f"cluster '{text}': this is a directory; name a TOML file")
        word = name if count is not None else text
        raise ClusterError(
            f"cluster '{text}': unknown preset '{word}'; {_nearest_preset(word)} "
            "(a cluster is PRESETxCOUNT, the path of a TOML file, or local)"
        )
    settings = settings_of(name)
    if count is not None:
        settings["count"] = count
    return build(text, name, settings, PRESETS[name].achieved_bf16 / PRESETS[name].bf16)


def _is_measured(text: str) -> bool:
    """Whether a text names a file of JSON, as `plait probe --out FILE` writes one."""
    if text.endswith(".json"):
        return True
    try:
        with Path(text).open("rb") as file:
            return file.read(1) == b"{"  # no TOML begins so
    except (OSError, ValueError):
        return False


def _hardware_of_measured(path: str) -> Hardware:
    """The machine of a file of `plait probe --out FILE`. Errors: `ClusterError`."""
    probe = read_probe(path)
    if probe is None:
        raise ClusterError(f"{path}: this file is not there, or not to be read")
    return hardware_of_probe(probe, path)


def hardware_of_tables(name: str, tables: JsonMapping) -> Hardware:
    """The hardware of a TOML file's tables; raises `ClusterError` naming unknown keys and
    impossible numbers.
    """
    by_key = _flatten(name, tables)
    preset_name = by_key.pop("device.preset", None)
    if preset_name == "local":
        return _calibrated_local(name, by_key)
    if preset_name is not None and (not isinstance(preset_name, str) or preset_name not in PRESETS):
        raise ClusterError(
            f"{name}: [device] preset {preset_name!r} is unknown; "
            f"{_nearest_preset(str(preset_name))}"
        )
    preset = PRESETS[preset_name] if preset_name else None
    settings = {**(settings_of(preset_name) if preset_name else DEFAULTS), **by_key}
    if preset is not None and preset.pair_bandwidth and "node.pair_bandwidth_gbps" not in by_key:
        settings["node.pair_bandwidth_gbps"] = _pair_bandwidth(preset, settings)
    peak: JsonValue = settings.get("device.peak_tflops")
    if not isinstance(peak, Mapping) and not number_faults("", peak, BOUNDS["device.peak_tflops"]):
        # one number is the bf16 peak; the other precisions keep the preset's ratio to it, or share
        # it
        known = preset.peaks if preset else dict.fromkeys(WIDE, 1.0)
        settings["device.peak_tflops"] = {
            precision: peak * rate / known["bf16"] for precision, rate in known.items()
        }
    elif isinstance(peak, Mapping) and not faults({**settings, "device.peak_tflops": peak}):
        settings["device.peak_tflops"] = {**preset.peaks, **peak} if preset else peak
    part = preset.achieved_bf16 / preset.bf16 if preset else 0.0
    return build(name, preset_name or Path(name).stem, settings, part)


def _pair_bandwidth(preset: Preset, settings: JsonMapping) -> float:
    """The rate of two devices alone: the preset's, scaled as that of all devices was."""
    own = settings["node.bandwidth_gbps"]
    if number_faults("", own, BOUNDS["node.bandwidth_gbps"]):
        return preset.pair_bandwidth  # the fault of the other number will be told
    scaled = preset.pair_bandwidth * (own / preset.node_bandwidth)
    return min(scaled, BOUNDS["node.pair_bandwidth_gbps"].most)


def _calibrated_local(name: str, given: JsonObject) -> Hardware:
    """This machine as it was measured, with a calibration; nothing else of it can be set."""
    wrong = [
        f"{key} cannot be set for preset 'local', which plait probe measures"
        for key in given
        if key not in CALIBRATION_BOUNDS
    ]
    for key, bounds in CALIBRATION_BOUNDS.items():
        wrong += number_faults(key, given[key], bounds) if key in given else []
    if wrong:
        raise ClusterError(f"{name}: {wrong[0]}")
    return hardware_of_probe(read_probe())._replace(name=name, calibration=calibration_of(given))


def _flatten(name: str, tables: JsonMapping) -> JsonObject:
    """The settings by dotted key, after refusing keys that no setting has."""
    known = {*BOUNDS, "device.preset"}
    settings: JsonObject = {}
    for section, value in tables.items():
        if section in SECTIONS and not isinstance(value, Mapping):
            raise ClusterError(
                f"{name}: [{section}] must be a table of keys, not {value!r}; write [{section}] "
                "and its keys below it"
            )
        if isinstance(value, Mapping):
            settings.update({f"{section}.{key}": number for key, number in value.items()})
        else:
            settings[section] = value
    unknown = [f"unknown key {key}; {nearest(key, known)}" for key in settings if key not in known]
    if unknown:
        raise ClusterError(
            f"{name}: {unknown[0]}" if len(unknown) == 1 else "\n  ".join([f"{name}:", *unknown])
        )
    peaks = settings.get("device.peak_tflops")
    if isinstance(peaks, Mapping) and (set(peaks) - set(PRECISIONS) or not peaks):
        raise ClusterError(
            f"{name}: device.peak_tflops is one number, or a table with {', '.join(PRECISIONS)}"
        )
    return settings


def _nearest_preset(word: str) -> str:
    lower = word.lower()
    family = [name for name in PRESETS if word and name.startswith(f"{lower}-")]
    family = [] if lower in PRESETS else family
    return f"did you mean {' or '.join(family)}?" if family else nearest(lower, PRESETS)


def hold_probe(path: Path, probe: JsonObject) -> None:
    """Let this process read measurements at a path that cannot be written."""
    _held[path] = probe


def read_probe(path: str | Path | None = None) -> JsonObject | None:
    """The measurements that `plait probe` wrote, or None when it has not run here.

    Raises:
        ClusterError: they cannot be read, or are no JSON object.
    """
    path = Path(path) if path is not None else default_probe_path()
    try:
        probe = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return _held.get(path)
    except (OSError, ValueError) as cause:
        raise ClusterError(
            f"{path}: the measurements cannot be read ({cause}); run plait probe again"
        ) from None
    if not isinstance(probe, dict):
        raise ClusterError(
            f"{path}: the measurements are not one JSON object; run plait probe again"
        )
    return probe
