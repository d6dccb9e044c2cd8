"""A page and its data over HTTP: loopback unless asked, a token, one question at a time.

The planner's answers are computed behind one lock, and kept. The page itself is sent at once.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import select
import signal
import socket
import socketserver
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NoReturn
from urllib.parse import parse_qs, urlsplit

from plait.errors import ConfigError
from plait.explore.question import Choices

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
MOST_BYTES: Final = 1 << 20
"""Bytes of a question; a config.json has a few thousand."""
MOST_KEPT: Final = 128
TOKEN: Final = "token"
TOKEN_HEADER: Final = "X-Plait-Token"
WAIT_SECONDS: Final = 30.0
"""How long a client may take to send its question."""


@dataclass(frozen=True)
class WebReply:
    """An answer over HTTP: a status, and text of a kind."""

    text: str
    status: HTTPStatus = HTTPStatus.OK
    kind: str = "application/json"


@dataclass
class Site:
    """A page and its data by path, with the token that both ask for."""

    page: str
    answers: Mapping[str, Callable[[Choices], WebReply]]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    policy: str = ""
    """The Content-Security-Policy of the page."""
    keeps: bool = True
    """Whether a question that is asked again gets the answer of before."""
    hint: str = "; plait explore --host NAME allows another name"
    """A word to those who come by another name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[object, WebReply] = field(default_factory=OrderedDict)

    def answer(
        self, path: str, choices: Choices, left: Callable[[], bool] = lambda: False
    ) -> WebReply | None:
        """The reply to a question; None where the asker has `left` while it waited its turn."""
        key = (path, tuple(sorted((name, tuple(values)) for name, values in choices.items())))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if left():
                return None
            reply = self.answers[path](choices)
            if self.keeps and reply.status is HTTPStatus.OK:
                self._kept[key] = reply
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return reply


class _Handler(BaseHTTPRequestHandler):
    """One request. Refusals come before anything is computed."""

    server: PageServer
    server_version = "plait"
    sys_version = ""
    timeout = WAIT_SECONDS

    def do_GET(self) -> None:
        self._reply(urlsplit(self.path).query)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a question has a Content-Length of {MOST_BYTES:,} bytes at most",
            )
            return
        body = self.rfile.read(int(length)).decode("utf-8", "replace")
        self._reply("&".join(filter(None, (urlsplit(self.path).query, body))))

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: stdout is the answer's, and the page shows its own errors."""

    def _reply(self, query: str) -> None:
        site = self.server.site
        path = urlsplit(self.path).path
        try:
            fields = parse_qs(query, keep_blank_values=True, max_num_fields=100)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "a question has 100 fields at most")
            return
        token, slash, appended = fields.pop(TOKEN, [""])[-1].partition("/")
        if slash:  # a path written behind the address that was printed
            path = f"/{appended}"
        token = token or self._token_of_headers()
        if not self.server.may_be_called(self.headers.get("Host", "")):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                f"this page answers to 127.0.0.1 and localhost{site.hint}",
            )
        elif not secrets.compare_digest(token.encode(), site.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                "the token is missing or wrong; open the address that was printed",
            )
        elif path in ("/", "/index.html"):
            self._send(WebReply(site.page, kind="text/html"))
        elif path in site.answers:
            reply = site.answer(path, fields, self._has_left)
            if reply is not None:
                self._send(reply)
        else:
            known = ", ".join(["/", *site.answers])
            self._refuse(HTTPStatus.NOT_FOUND, f"nothing is here; there are {known}")

    def _token_of_headers(self) -> str:
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.headers.get(TOKEN_HEADER, bearer)

    def _has_left(self) -> bool:
        readable = select.select([self.connection], [], [], 0)[0]
        try:
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._send(WebReply(sentence, status, "text/plain"))

    def _send(self, reply: WebReply) -> None:
        body = reply.text.encode("utf-8", "replace")
        try:
            self.send_response(reply.status)
            self.send_header("Content-Type", f"{reply.kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            if self.server.site.policy:
                self.send_header("Content-Security-Policy", self.server.site.policy)
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the asker has left
            self.close_connection = True


class PageServer(socketserver.ThreadingTCPServer):
    """The server of one site; a request has a thread.

    Errors: `ConfigError` for a port that is taken, or an address that this machine has not.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, site: Site, host: str = LOOPBACK[0], port: int = 0) -> None:
        self.site = site
        self.host = host
        if ":" in host:
            self.address_family = socket.AF_INET6
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port is {port}; a port is a number from 0 (a free one) to 65535")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(_refused(error, host, port)) from None

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_address[1]}/?{TOKEN}={self.site.token}"

    def may_be_called(self, host: str) -> bool:
        """Whether the Host of a request is this server's own name.

        A foreign name whose address was turned to loopback (DNS rebinding) is not.
        """
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:  # brackets that hold no address
            return False
        if name in LOOPBACK or name == self.host.lower():
            return True
        return self.host not in LOOPBACK and name is not None and _is_address(name)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: a client that breaks off is no fault of the server."""

    def run(self) -> None:
        """Serve until Ctrl-C (KeyboardInterrupt) or SIGTERM, which ends the process with 0."""
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            self.serve_forever(poll_interval=0.2)
        finally:
            signal.signal(signal.SIGTERM, before)
            self.server_close()


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is taken by another program; choose another, or leave --port "
            "out for a free one"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} needs more rights; choose one above 1023"
    reason = error.strerror or str(error)
    return (
        f"the page cannot be served at {host}:{port}: {reason}; --host is an address of this "
        "machine"
    )
