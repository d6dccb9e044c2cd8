"""The kinds of input: each a function of a generator and the bench, giving one command line."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Final

from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.text import dumps
from tests.fuzz.bench import (
    CLUSTER,
    FEDERATED,
    GPT,
    LLAMA,
    MLP,
    MODELS,
    PROBE,
    RESNET,
    Bench,
    sound_config,
)
from tests.fuzz.words import (
    NUMBERS,
    TEXTS,
    VALUES,
    damaged_bytes,
    damaged_tree,
    nested,
    toml,
)

AXES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "dp": (
            "allreduce",
            "ring",
            "server",
            "async-server,stale",
            "local,every",
            "zero1",
            "zero3",
        ),
        "tp": ("1d", "1d,sp", "2d", "2.5d,depth", "3d"),
        "pp": (*SCHEDULES, "interleaved,v"),
        "cp": ("ring", "ulysses"),
    }
)


def _number(random: Random) -> str:
    return random.choice(NUMBERS) if random.random() < 0.4 else str(random.randint(0, 12))


def sound_plan(random: Random) -> str:
    """A text of the grammar, whose numbers may not fit."""
    size = str(random.choice((1, 2, 2, 3, 4, 8)))
    dp = random.choice(("", ":ring", ":server", ":async-server,stale1", ":local,every2", ":zero3"))
    tp = random.choice(("", ":1d,sp", ":2d", ":3d"))
    pp = random.choice((*SCHEDULES, "interleaved,v2", "interleaved,v3"))
    terms = (f"dp{size}{dp}", f"tp2{tp}", f"tp4{tp}", f"pp2:{pp}", f"pp{size}:{pp}", "cp2", "ep2")
    ends = ("mb8", "mb4", f"mb{random.choice((3, 5, 100000))}", "compile", "remat:selective")
    chosen = random.sample(terms, random.choice((1, 1, 2))) + random.sample(ends, 1)
    return " ".join(chosen)


def plan_text(random: Random) -> str:
    """A text near the grammar, or far from it."""
    if random.random() < 0.45:
        return sound_plan(random)
    if random.random() < 0.1:
        return random.choice(TEXTS)
    terms = []
    for _ in range(random.randint(1, 5)):
        axis = random.choice((*AXES, "mb", "ep", "remat:", "precision:", "compile"))
        term = f"{axis}{_number(random) if axis in (*AXES, 'mb', 'ep') else ''}"
        if axis in AXES and random.random() < 0.7:
            word = random.choice(AXES[axis])
            term += f":{word}"
            term += _number(random) if word[-5:] in ("stale", "every", "depth") else ""
            term += _number(random) if word.endswith(",v") else ""
            term += random.choice(("", "", ",offload", ",replicate2", ",", ",stale²", ",v-1"))
        elif axis.endswith(":"):
            term += random.choice(("full", "selective", "none", "bf16", "float64", "", "x"))
        terms.append(term)
    text = random.choice((" ", " ", "  ", "\t")).join(terms)
    if random.random() < 0.1:
        text = damaged_bytes(random, text.encode("utf-8", "replace")).decode("utf-8", "replace")
    return text * 2000 if random.random() < 0.01 else text


def plans(random: Random, bench: Bench) -> list[str]:
    """Plan texts."""
    text = plan_text(random)
    where = random.choice(("h100x64", "h100x8", "a100-80gbx100000"))
    sizes = ["--set", f"train.global_batch={random.choice((8, 64, 10**9))}"]
    return random.choice(
        (
            ["estimate", bench.config, f"--plan={text}", "--cluster", where, *sizes],
            ["train", bench.config, f"--plan={text}", "--nproc", "3"],
            ["verify", bench.config, f"--plan={text}", *sizes],
            ["compare", bench.config, "--plans", "dp1", text, "--html", f"{bench.config}/a/b.html"],
            ["export", "plan", text, "--to", random.choice(("megatron-lm", "deepspeed", "x"))],
            ["export", "plan", text, "--to", "torchtitan", f"--global-batch={_number(random)}"],
        )
    )


def schedules(random: Random, bench: Bench) -> list[str]:
    """A schedule by name."""
    name = random.choice((*SCHEDULES, "interleaved,v2", "interleaved,v²", "interleaved,v", "x"))
    name = random.choice(TEXTS) if random.random() < 0.1 else name
    words = ["schedule", name]
    for option in ("--stages", "--microbatches", "--virtual"):
        if random.random() < 0.7:
            words.append(f"{option}={_number(random)}")
    if random.random() < 0.2:
        words.append(f"--svg={random.choice((bench.config + '/x.svg', '/', '', 'x' * 300))}")
    return words


def schedule_files(random: Random, bench: Bench) -> list[str]:
    """A schedule of the user's own, read by two verbs."""
    name = random.choice(tuple(SCHEDULES))
    virtual = 2 if name == "interleaved" else 1
    text = dumps(make(name, 2, 4, virtual))
    for _ in range(random.randint(0, 2)):
        field = random.choice(("delay", "steps", "micro-batches", "placement", "name", "x", "0:"))
        text += f"{field} {random.choice(NUMBERS + TEXTS)[:6000]}\n"
    damaged = (
        damaged_bytes(random, text.encode("utf-8", "replace"))
        if random.random() < 0.7
        else text.encode("utf-8", "replace")
    )
    path = bench.file("schedule.txt", damaged)
    if random.random() < 0.5:
        return ["schedule", path]
    own = ["--set", f"plan.schedule='{path}'"]
    return ["train", bench.config, "--plan=pp2 mb4", *own]


def configs(random: Random, bench: Bench) -> list[str]:
    """A damaged config, by the verbs that read one."""
    tables: Any = sound_config(random.choice(MODELS))
    text = toml(damaged_tree(random, tables)).encode("utf-8", "replace")
    if random.random() < 0.2:
        text = damaged_bytes(random, toml(tables).encode())
    if random.random() < 0.03:
        depth = random.choice((100, 3000, 100_000))
        text = f"x = {nested(depth, *random.choice(('[]', ('{a=', '}'))))}".encode()
    path = bench.file("config.toml", text)
    if random.random() < 0.02:
        path = random.choice(TEXTS)
    return random.choice(
        (
            ["train", path],
            ["verify", path, "--plan=dp2"],
            ["estimate", path, "--plan=dp2", "--cluster=h100x8"],
            ["compare", path, "--plans", "dp1"],
            ["export", "plan", path, "--to", "deepspeed"],
        )
    )


def config_files(random: Random, bench: Bench) -> list[str]:
    """A pasted config.json of a model."""
    tree: Any = {"model_type": random.choice(("llama", "gpt2", "mixtral", "x")), **LLAMA}
    del tree["name"]
    text = json.dumps(damaged_tree(random, tree))
    if random.random() < 0.1:
        text = nested(random.choice((100, 100_000)), "[", "]")
    path = bench.file("config.json", text)
    return ["estimate", path, "--plan=dp2", "--cluster=h100x8"]


def clusters(random: Random, bench: Bench) -> list[str]:
    """A cluster's file or name."""
    text = toml(damaged_tree(random, CLUSTER)).encode("utf-8", "replace")
    if random.random() < 0.2:
        text = damaged_bytes(random, toml(CLUSTER).encode())
    where = bench.file("cluster.toml", text)
    if random.random() < 0.3:
        preset = random.choice(("h100", "gb200", "mi300x", "local", "h", "x", ""))
        where = f"{preset}x{_number(random)}" if random.random() < 0.8 else random.choice(TEXTS)
    words = [bench.config, f"--cluster={where}", "--set", "train.global_batch=64"]
    if where != "local" and random.random() < 0.1:
        return ["plan", *words, f"--gpus={random.choice(('-1', '0', '2', '4', 'x'))}", "--top=1"]
    return ["estimate", *words, "--plan=dp2"]


def probes(random: Random, bench: Bench) -> list[str]:
    """Damaged measurements of this machine."""
    path = Path.home() / ".cache" / "plait" / "probe.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {**PROBE, "is_cpu": random.random() < 0.5, "host": None}
    path.write_text(json.dumps(damaged_tree(random, tree)))
    if random.random() < 0.2:
        path.write_bytes(damaged_bytes(random, json.dumps(PROBE).encode()))
    if random.random() < 0.05:
        path.write_text(nested(100_000, "[", "]"))
    return ["estimate", bench.config, "--plan=dp2", "--cluster=local"]


def overrides(random: Random, bench: Bench) -> list[str]:
    """`--set` with keys and values of all kinds."""
    tables = sound_config(GPT)
    keys = [f"{section}.{key}" for section, table in tables.items() for key in table]
    keys += ["train.restarts", "train.compress", "plan.counts", "plan.splits", "plan.schedule"]
    keys += ["data.python", "model.python", "data.files", "model.config", "train.loss", "x.y", "a"]
    given = []
    for _ in range(random.randint(1, 3)):
        value: Any = random.choice(VALUES)
        text = random.choice((*NUMBERS, *TEXTS)) if random.random() < 0.5 else json.dumps(value)
        if random.random() < 0.02:
            text = nested(100_000, "[", "]")
        given.append(
            f"{random.choice(keys)}{random.choice(('=', '=', '=', '', '==', '.z='))}{text}"
        )
    verb = random.choice((["train"], ["estimate"], ["verify", "--plan=dp2"]))
    return [verb[0], bench.config, *verb[1:], "--set", *given]


def run_folders(random: Random, bench: Bench) -> list[str]:
    """`plait report` of a run whose files are damaged."""
    run = bench.copied(bench.run)
    path = random.choice(sorted(run.iterdir()))
    path = run / random.choice(("trace.json", "summary.json", "metrics.jsonl", path.name))
    kind = random.random()
    if kind < 0.55 and path.suffix == ".json":
        path.write_text(json.dumps(damaged_tree(random, json.loads(path.read_text()))))
    elif kind < 0.55 and path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        damaged = damaged_tree(random, lines)
        damaged = damaged if isinstance(damaged, list) else [damaged]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in damaged))
    elif kind < 0.6:
        path.unlink()
    elif kind < 0.63:
        path.write_text(nested(100_000, "[", "]"))
    elif path.name == "plan.txt":
        path.write_text(plan_text(random), encoding="utf-8", errors="replace")
    else:
        path.write_bytes(damaged_bytes(random, path.read_bytes()))
    out = [] if random.random() < 0.9 else [f"--out={random.choice(TEXTS)}"]
    out = out if out != ["--out=/dev/null"] else []
    return ["report", str(run), *out]


def checkpoints(random: Random, bench: Bench) -> list[str]:
    """`plait export checkpoint` of damaged files, half of the indices with a checksum that fits."""
    run = bench.copied(bench.saved)
    directory = next((run / "checkpoints").glob("step-*"))
    path = random.choice([*sorted(directory.iterdir()), *[directory / "checkpoint.json"] * 3])
    if path.name == "checkpoint.json" and random.random() < 0.7:
        index = damaged_tree(random, json.loads(path.read_text()))
        if isinstance(index, dict) and random.random() < 0.8:
            body = {key: index[key] for key in index if key not in ("format", "checksum")}
            text = json.dumps(body, sort_keys=True)
            index["checksum"] = f"{zlib.crc32(text.encode()):08x}"
        path.write_text(json.dumps(index))
    elif random.random() < 0.05:
        (run / "checkpoints" / "latest").write_text(random.choice(TEXTS), errors="replace")
    else:
        path.write_bytes(damaged_bytes(random, path.read_bytes()))
    out = str(bench.folder / "exported")
    return ["export", "checkpoint", str(run), f"--out={out}"]


def federations(random: Random, bench: Bench) -> list[str]:
    """A damaged `[federated]`, simulated or deployed."""
    tables = {**sound_config(random.choice((MLP, MLP, RESNET, GPT))), "federated": dict(FEDERATED)}
    tables["data"] = {"name": "digits"}
    damaged = damaged_tree(random, tables["federated"])
    tables["federated"] = damaged if isinstance(damaged, dict) else {"clients": damaged}
    for key in random.sample(("clip", "noise", "secure", "strategy", "num_bad", "workers"), 2):
        if random.random() < 0.5:
            value = random.choice((*VALUES, "krum", "scaffold", "median"))
            tables["federated"][key] = value
    path = bench.file("federated.toml", toml(tables).encode("utf-8", "replace"))
    if random.random() < 0.2:
        words = [f"--host={random.choice(TEXTS)}", f"--port={_number(random)}"]
        return ["federated", path, "--deploy", f"{bench.config}/x", *words]
    rounds = [f"--rounds={_number(random)}"] if random.random() < 0.3 else []
    return ["federated", path, *rounds]


def command_lines(random: Random, bench: Bench) -> list[str]:
    """Verbs and options in any order."""
    verbs = ("train", "verify", "compare", "plan", "estimate", "schedule", "report", "export", "x")
    options = (
        "--plan",
        "--steps",
        "--cluster",
        "--json",
        "--set",
        "--nproc",
        "--out",
        "--top",
        "-x",
    )
    words = [random.choice(verbs) if random.random() < 0.9 else random.choice(TEXTS)]
    for _ in range(random.randint(0, 5)):
        pool = (bench.config, random.choice(TEXTS), random.choice(NUMBERS), random.choice(options))
        words.append(random.choice(pool))
    if "--out" in words or any(word.startswith("--out=") for word in words):
        words = [word for word in words if not word.startswith("--out")]
    return [word for word in words if word] or ["x"]


KINDS: Final[Mapping[str, Callable[[Random, Bench], list[str]]]] = MappingProxyType(
    {
        "plan texts": plans,
        "schedules": schedules,
        "schedule files": schedule_files,
        "configs": configs,
        "pasted configs": config_files,
        "clusters": clusters,
        "probe files": probes,
        "overrides": overrides,
        "run folders": run_folders,
        "checkpoints": checkpoints,
        "federated configs": federations,
        "command lines": command_lines,
    }
)
