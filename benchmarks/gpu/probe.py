"""What `plait probe --json` measures on this machine, beside the card's preset."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.gpu.child import Turn
from benchmarks.gpu.predicted import card_machine, preset


def measure(turn: Turn, number: str) -> None:
    """Run the command, and print its rates over the preset's."""
    out = turn.record.folder / "probe.json"
    command = [sys.executable, "-m", "plait", "probe", "--json", "--quick", "--out", str(out)]
    if turn.device == "cpu":
        command += ["--nproc", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(ran.stderr)
    (turn.record.folder / "probe-stdout.json").write_text(ran.stdout)
    if ran.returncode:
        last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
        raise RuntimeError(f"plait probe ended with {ran.returncode}: {(last or ['?'])[-1]}")
    found = json.loads(out.read_text())
    machine = card_machine()
    turn.record.head(
        f"plait probe: {found['num_devices']} x {found['name']}, preset {preset()}",
        ("number", "measured", "the preset's data sheet", "measured / data sheet"),
    )
    rows = {
        f"product {name}, TFLOP/s": (rate / 1e12, machine.peak_flops.get(name, 0.0) / 1e12)
        for name, rate in found["peak_flops"].items()
    }
    rows["memory, GB/s"] = found["memory_bandwidth"] / 1e9, machine.memory_bandwidth / 1e9
    rows["memory, GB"] = found["memory_bytes"] / 1e9, machine.memory_bytes / 1e9
    for name, (measured, told) in rows.items():
        turn.record.row(name, f"{measured:.1f}", f"{told:.1f}", f"{measured / (told or 1):.3f}")
    keeping = {key: f"{value:.3g}" for key, value in found.get("keeping", {}).items()}
    turn.record.row("keeping a run's state", json.dumps(keeping), "", "")
    turn.record.keep(**{key: found[key] for key in found if key not in {"measured", "host"}})
