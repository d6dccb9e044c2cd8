"""What `--deploy` writes, without running it: who gets which secret, and that no script speaks to
anybody else.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plait.config import load
from plait.errors import ConfigError, RunError
from plait.outer.federated import deploy
from tests.federated.tables import DIGITS

CONFIG = {
    **DIGITS,
    "federated": {"clients": 2},
}

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("openssl", "ssh-keygen"))), reason="needs openssl and ssh-keygen"
)


def test_scripts_are_silent_and_keys_stay_where_they_belong(tmp_path: Path) -> None:
    written = deploy.write(load(CONFIG, []), tmp_path / "d", "127.0.0.1", 9092)
    scripts = sorted((tmp_path / "d").rglob("*.sh"))
    assert [str(path) for path in scripts] == sorted(
        [written["server"], written["register"], written["begin"], *written["clients"]]
    )
    for script in scripts:
        text = script.read_text()
        assert "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 " in text
        assert "--insecure" not in text
    kept = {
        str(path.relative_to(tmp_path / "d")): path.stat().st_mode & 0o077
        for path in (tmp_path / "d").rglob("*key")
    }
    assert kept == dict.fromkeys(
        ["authority/ca.key", "server/server.key", "client-0/key", "client-1/key"], 0
    )
    assert not list((tmp_path / "d" / "client-0").glob("ca.key"))
    with pytest.raises(RunError, match="is not empty"):
        deploy.write(load(CONFIG, []), tmp_path / "d", "127.0.0.1", 9092)


@pytest.mark.parametrize("host", ["a b;rm -rf /", "$(id)", "a'b", "-x", "a\nb", ""])
def test_a_host_that_is_none_is_refused_before_anything_is_written(
    host: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no name or address"):
        deploy.write(load(CONFIG, []), tmp_path / "d", host, 9092)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("port", [-1, 0, 65525, 99999999])
def test_a_port_that_is_none_is_refused(port: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="between 1 and 65535"):
        deploy.write(load(CONFIG, []), tmp_path / "d", "127.0.0.1", port)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["federated.clients=1", "federated.secure=true"], "hides nothing in the sum of one"),
        (["federated.fraction=0.5", "federated.secure=true"], "asks 1 a round"),
        (["federated.clients=4", "federated.min_replies=5"], "asks at most 4 a round"),
        (["federated.fraction=0.01", "federated.min_replies=2"], "ask for 1 or fewer"),
        (["federated.strategy=krum", "federated.num_bad=5"], "too few for krum with num_bad 5"),
    ],
)
def test_a_federation_with_too_few_clients_is_refused_at_once(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(CONFIG, overrides)
