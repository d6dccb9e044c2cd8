"""The server of a page: a token, its own name, and a sentence for what it refuses."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from plait.errors import ConfigError
from plait.explore.question import Choices
from plait.explore.server import MOST_BYTES, PageServer, Site, WebReply


@contextmanager
def served(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def asked() -> list[Choices]:
    return []


@pytest.fixture
def server(asked: list[Choices]) -> Iterator[PageServer]:
    def echo(choices: Choices) -> WebReply:
        asked.append(choices)
        return WebReply(str(choices))

    with served(
        PageServer(Site("the page", {"/echo.json": echo}, policy="default-src 'none'"))
    ) as one:
        yield one


def fetch(
    server: PageServer, path: str, body: str | None = None, **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, body, named)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text, reply.headers


def test_the_address_opens_the_page_with_its_policy(server: PageServer) -> None:
    parts = urlsplit(server.url)
    assert parts.hostname == "127.0.0.1" and parts.path == "/"
    status, text, headers = fetch(server, f"/?{parts.query}")
    assert (status, text) == (200, "the page")
    assert headers["Content-Security-Policy"] == "default-src 'none'"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/echo.json", "/echo.json?token="])
def test_without_the_token_nothing_is_told(
    server: PageServer, asked: list[Choices], path: str
) -> None:
    status, text, _ = fetch(server, path)
    assert status == 403 and "token" in text and not asked


def test_the_token_comes_in_the_query_or_in_a_header(server: PageServer) -> None:
    token = server.site.token
    by_query = fetch(server, f"/echo.json?a=1&token={token}")
    by_header = fetch(server, "/echo.json", "a=1", X_Plait_Token=token)
    by_bearer = fetch(server, "/echo.json?a=1", Authorization=f"Bearer {token}")
    assert by_query[:2] == by_header[:2] == by_bearer[:2] == (200, "{'a': ['1']}")


def test_a_path_may_be_written_behind_the_address_that_was_printed(server: PageServer) -> None:
    address = f"/?token={server.site.token}"
    assert fetch(server, f"{address}/echo.json")[:2] == (200, "{}")
    assert fetch(server, f"{address}x/echo.json")[0] == 403


def test_a_foreign_name_is_refused_though_it_leads_here(server: PageServer) -> None:
    for host in ("evil.example", f"evil.example:{server.server_address[1]}", "[::", ""):
        status, text, _ = fetch(server, f"/?token={server.site.token}", Host=host)
        assert status == 403 and "127.0.0.1 and localhost" in text, host
    assert fetch(server, f"/?token={server.site.token}", Host="localhost:1")[0] == 200


def test_an_unknown_path_and_a_long_question_are_said(server: PageServer) -> None:
    token = server.site.token
    assert "/echo.json" in fetch(server, f"/plans.json?token={token}")[1]
    status, text, _ = fetch(server, "/echo.json", "", X_Plait_Token=token, Content_Length="9" * 9)
    assert status == 413 and f"{MOST_BYTES:,}" in text


def test_an_answer_is_kept_and_nobody_waits_for_one_who_left(asked: list[Choices]) -> None:
    def count(choices: Choices) -> WebReply:
        asked.append(choices)
        return WebReply("done")

    site = Site("", {"/count": count})
    assert site.answer("/count", {}, lambda: True) is None
    first = site.answer("/count", {}, lambda: False)
    assert site.answer("/count", {}, lambda: True) is first and len(asked) == 1


def test_a_port_that_is_taken_is_one_sentence(server: PageServer) -> None:
    port = int(server.server_address[1])
    with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
        PageServer(server.site, port=port)
    with pytest.raises(ConfigError, match="from 0"):
        PageServer(server.site, port=70000)
    with pytest.raises(ConfigError, match="an address of this machine"):
        PageServer(server.site, host="203.0.113.1")


def test_beyond_loopback_addresses_are_names_too() -> None:
    server = PageServer(Site("", {}), host="0.0.0.0")
    try:
        assert server.may_be_called("192.0.2.7:80") and not server.may_be_called("evil.example")
    finally:
        server.server_close()
