"""Write what a real deployment on Flower needs: an app, certificates, a key for each client, and the commands.

The certificates are a private authority's own, made here with OpenSSL's command: the server proves itself to clients by TLS,
and each client to the server by a key that is registered there. Flower's telemetry is off in every command.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from plait.config import Config
from plait.errors import RunError

VALID_DAYS = 365

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "plait-federation"
version = "1.0.0"
description = "A federation of plait engines"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "plait"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "plait_federation.server:app"
clientapp = "plait_federation.client:app"

[tool.flwr.app.config]
"""

CLIENT = '''\
"""The app of a client: see plait.federated.flower."""

from pathlib import Path

from plait.federated.flower import client_app

app = client_app(Path(__file__).parent / "config.toml")
'''

SERVER = '''\
"""The app of the server: see plait.federated.flower."""

from pathlib import Path

from plait.federated.flower import server_app

app = server_app(Path(__file__).parent / "config.toml", out={out!r})
'''


def write(config: Config, folder: Path, host: str, port: int) -> dict[str, Any]:
    """Write the deployment of `config` into `folder`, with the server at `host`:`port`.

    Returns the commands, as lists of words without the folder's environment, and `text` for people. Raises `RunError` when
    the folder is in use or OpenSSL's command is missing.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; give --deploy a new folder")
    folder = folder.resolve()
    app = folder / "app" / "plait_federation"
    app.mkdir(parents=True)
    (folder / "app" / "pyproject.toml").write_text(PYPROJECT)
    (app / "__init__.py").write_text('"""A federation of plait engines."""\n')
    (app / "client.py").write_text(CLIENT)
    (app / "server.py").write_text(SERVER.format(out=str(folder / "rounds.json")))
    (app / "config.toml").write_text(config.to_toml())
    certificates(folder / "certificates", host)
    keys = [client_key(folder / "keys", client) for client in range(config.federated.clients)]
    commands = _commands(folder, host, port, keys)
    text = _text(commands)
    (folder / "COMMANDS.md").write_text(text)
    return {"folder": str(folder), **commands, "text": text}


def certificates(folder: Path, host: str) -> None:
    """An authority (ca.crt) and a certificate of the server signed by it (server.pem, server.key)."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"IP:{host}" if host.replace(".", "").isdigit() else f"DNS:{host}"
    (folder / "server.ext").write_text(f"subjectAltName = {name}, DNS:localhost, IP:127.0.0.1\n")
    key = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"]
    _openssl(folder, *key, "-out", "ca.key")
    _openssl(
        folder,
        "req",
        "-x509",
        "-new",
        "-key",
        "ca.key",
        "-subj",
        "/CN=plait federation",
        "-days",
        str(VALID_DAYS),
        "-out",
        "ca.crt",
    )
    _openssl(folder, *key, "-out", "server.key")
    _openssl(folder, "req", "-new", "-key", "server.key", "-subj", f"/CN={host}", "-out", "server.csr")
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(VALID_DAYS), "-extfile", "server.ext"]
    _openssl(folder, "x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem")
    for secret in ("ca.key", "server.key"):
        (folder / secret).chmod(0o600)


def client_key(folder: Path, client: int) -> Path:
    """A client's private key (client-N) and its public one in OpenSSH's form (client-N.pub), which the server registers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"client-{client}"
    keygen = shutil.which("ssh-keygen")
    if keygen is None:
        raise RunError("ssh-keygen is not installed; it makes the clients' keys")
    words = [keygen, "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", f"client-{client}", "-f", str(path)]
    subprocess.run(words, check=True, capture_output=True)
    return path


def _openssl(folder: Path, *words: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        raise RunError("openssl is not installed; it makes the certificates of the server")
    done = subprocess.run([openssl, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"openssl {words[0]} failed: {done.stderr.strip()}")


def _commands(folder: Path, host: str, port: int, keys: list[Path]) -> dict[str, Any]:
    made, address = folder / "certificates", f"{host}:{port}"
    server = [
        *("flower-superlink", "--host", host, "--port", str(port), "--enable-supernode-auth"),
        *("--ssl-ca-certfile", str(made / "ca.crt"), "--ssl-certfile", str(made / "server.pem")),
        *("--ssl-keyfile", str(made / "server.key"), "--disable-runtime-dependency-installation"),
    ]
    clients = [
        [
            *("flower-supernode", "--superlink", address, "--root-certificates", str(made / "ca.crt")),
            *("--auth-supernode-private-key", str(key), "--port", str(port + 10 + number)),
            *("--node-config", f"partition-id={number} num-partitions={len(keys)}"),
        ]
        for number, key in enumerate(keys)
    ]
    register = [["flwr", "supernode", "register", f"{key}.pub", "plait"] for key in keys]
    connection = f'[superlink.plait]\naddress = "{address}"\nroot-certificates = "{made / "ca.crt"}"\n'
    run = ["flwr", "run", str(folder / "app"), "plait", "--stream"]
    return {"server": server, "register": register, "clients": clients, "run": run, "connection": connection}


def _text(commands: dict[str, Any]) -> str:
    def lines(words: list[list[str]]) -> str:
        return "\n".join("FLWR_TELEMETRY_ENABLED=0 " + " ".join(_quoted(word) for word in line) for line in words)

    return "\n".join(
        [
            "# To run this federation",
            "",
            "On the server's machine:",
            "",
            lines([commands["server"]]),
            "",
            "Wherever Flower's command is used, in `$FLWR_HOME/config.toml` (`~/.flwr/config.toml`):",
            "",
            commands["connection"],
            "Register the clients, once:",
            "",
            lines(commands["register"]),
            "",
            "On each client's machine (with `certificates/ca.crt` and its own key only):",
            "",
            lines(commands["clients"]),
            "",
            "Begin:",
            "",
            lines([commands["run"]]),
            "",
        ]
    )


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word
