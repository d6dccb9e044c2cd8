"""`plait train --live`: the page of a run, served while it goes on and by nobody afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from plait.cli.answer import Answer, Json
from plait.cli.entry import main
from plait.cli.live import served
from plait.explore.html import LIVE, page

STEP = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "tokens": 8, "seconds": 0.5}


def asked(
    url: str, path: str, token: str | None = None, host: str | None = None
) -> tuple[int, str]:
    parts = urlsplit(url)
    token = parse_qs(parts.query)["token"][0] if token is None else token
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    headers = {"X-Plait-Token": token} | ({"Host": host} if host else {})
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_the_folder_is_read_anew_and_the_server_ends_with_the_run(tmp_path: Path) -> None:
    seen: list[Json] = []

    def train() -> Answer:
        for _ in range(2):
            status, text = asked(answer.data["url"], "/plan.json")  # type: ignore[index]
            assert status == 200
            seen.append(json.loads(text))
            (tmp_path / "plan.txt").write_text("dp2")
            (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
        assert asked(str(answer.data and answer.data["url"]), "/", token="guess")[0] == 403
        assert asked(str(answer.data and answer.data["url"]), "/", host="evil.example")[0] == 403
        status, text = asked(str(answer.data and answer.data["url"]), "/")
        assert status == 200 and "uPlot" in text
        return Answer({"done": True})

    answer = served(tmp_path, train)
    assert answer.data is not None and answer.data["url"].startswith("http://127.0.0.1:")
    assert answer.serve is not None
    last = answer.serve()
    assert last is not None and last.data == {"done": True}
    assert [one["state"] for one in seen] == ["starting", "ended"]
    assert seen[1]["metrics"] == [STEP] and seen[1]["plan"] == "dp2" and seen[1]["loss"] == 2.5
    assert seen[1]["predicted"] is None and seen[1]["why_no_prediction"]
    with pytest.raises(OSError):
        asked(answer.data["url"], "/")


def test_a_run_that_fails_takes_its_server_along(tmp_path: Path) -> None:
    def train() -> Answer:
        raise KeyboardInterrupt

    answer = served(tmp_path, train)
    assert answer.serve is not None and answer.data is not None
    with pytest.raises(KeyboardInterrupt):
        answer.serve()
    with pytest.raises(OSError):
        asked(answer.data["url"], "/")


def test_under_torchrun_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "any.toml", "--live"]) == 2
    assert "leave --live out" in capsys.readouterr().err


def test_the_page_of_a_run_is_whole() -> None:
    html, policy = page({}, LIVE)
    assert "uPlot" in html and "/*" + "SCRIPT*/" not in html and "'unsafe" not in policy


def test_a_run_is_served_while_it_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(
        '[model]\nname = "mlp"\nin_features = 64\nhidden_size = 8\nnum_hidden_layers = 2\n'
        'out_features = 10\n[data]\nname = "digits"\n[train]\nsteps = 400\nglobal_batch = 4\n'
        '[plan]\ntext = "dp2"\n'
    )
    command = [sys.executable, "-m", "plait", "train", str(config), "--live", "--json"]
    command += ["--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        state: Json = {"metrics": []}
        deadline = time.monotonic() + 60
        while not state["metrics"] and time.monotonic() < deadline:
            state = json.loads(asked(url, "/plan.json")[1])
            time.sleep(0.1)
        assert state["metrics"] and state["plan"] == "dp2" and len(state["ranks"]) == 2
        rest, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert json.loads(rest.splitlines()[-1])["steps"] == 400
    with pytest.raises(OSError):
        asked(url, "/")
