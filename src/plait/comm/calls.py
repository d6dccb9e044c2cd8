"""Calls between ranks that are not in step. One rank asks when it likes; another answers from a
thread of its own.

Collectives and matched sends need both sides to agree on an order. A server that serves the first
caller has none. So these are plain TCP connections beside the process group, one for each pair. A
message is a header of numbers and one flat tensor; nothing is pickled. A caller proves by a secret,
which the ranks share through the process group, that it is one of them. A broken connection means
that its caller is lost. The caller may come back by a new one, which is answered when the old one
is done with.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import RankFailed

NUM_NUMBERS = 6
SECRET_BYTES = 32
_HEADER = struct.Struct(f"<B{NUM_NUMBERS}dQ")
_HELLO = struct.Struct(f"<{SECRET_BYTES}sI")
CONNECT_SECONDS = 20.0


@dataclass(frozen=True)
class CallMessage:
    """A kind, up to six numbers and a contiguous tensor [...], which travels as its bytes. Tensors
    of the receiver's own are filled; see `Connection.answer`.
    """

    kind: int
    numbers: tuple[float, ...] = ()
    data: Tensor | None = None


@dataclass(frozen=True)
class Address:
    """Where a service listens, and the secret that its callers must know."""

    host: str
    port: int
    secret: bytes

    def as_text(self) -> str:
        """The address as one word."""
        return f"{self.host}:{self.port}:{self.secret.hex()}"

    @staticmethod
    def of_text(text: str) -> Address:
        """The address that `str` wrote as one word."""
        host, port, secret = text.rsplit(":", 2)
        return Address(host, int(port), bytes.fromhex(secret))


Handler = Callable[[int, CallMessage], CallMessage]
"""(caller, question) -> answer; called in the caller's thread, and may block it. The question's
tensor is bytes (uint8).
"""


@dataclass(frozen=True)
class _Caller:
    """A connection, and the thread that answers it."""

    connection: socket.socket
    thread: threading.Thread


class Service:
    """Answers calls, each caller in a thread of its own. `lost(caller)` is called when a connection
    ends.

    A caller that connects again is lost first. `lost` must have a handler that still waits for that
    caller return or raise `ConnectionError`. So nothing of the old connection happens after the
    first question of the new one.
    """

    def __init__(
        self, handler: Handler, lost: Callable[[int], None], host: str = "127.0.0.1"
    ) -> None:
        self._handler = handler
        self._lost = lost
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = Address(
            host, self._listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES)
        )
        self._lock = threading.Lock()
        self._callers: dict[int, _Caller] = {}
        self._sent_bytes = 0
        self._closed = False
        threading.Thread(target=self._accept, name="plait-service", daemon=True).start()

    def take_sent_bytes(self) -> int:
        """The bytes of tensors sent in answers since the last time that this was asked."""
        with self._lock:
            sent = self._sent_bytes
            self._sent_bytes = 0
        return sent

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._closed = True
        with self._lock:
            connections = [caller.connection for caller in self._callers.values()]
        for connection in (self._listener, *connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="plait-service-caller", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """The life of one connection."""
        with connection:
            number = self._welcome(connection)
            if number is None:
                return
            caller = _Caller(connection, threading.current_thread())
            self._take_over(number, caller)
            with suppress(OSError):
                self._converse(number, connection)
            with self._lock:
                if self._callers.get(number) is not caller:  # the new connection has said so
                    return
                if not self._closed:
                    self._lost(number)  # under the lock: a new call is not in before
                del self._callers[number]

    def _welcome(self, connection: socket.socket) -> int | None:
        """The caller's number; None for a stranger."""
        hello = bytearray(_HELLO.size)
        connection.settimeout(CONNECT_SECONDS)
        try:
            _fill(connection, memoryview(hello))
        except OSError:
            return None
        secret, number = _HELLO.unpack(hello)
        if not hmac.compare_digest(secret, self.address.secret):
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return int(number)

    def _take_over(self, number: int, caller: _Caller) -> None:
        """From the caller's connection before this one, if it has not ended."""
        with self._lock:
            before = self._callers.get(number)
            self._callers[number] = caller
        if before is not None:
            with suppress(OSError):
                before.connection.shutdown(socket.SHUT_RDWR)
            self._lost(number)
            before.thread.join()

    def _converse(self, number: int, connection: socket.socket) -> None:
        """Answer until the connection ends."""
        buffer = torch.empty(0, dtype=torch.uint8)
        while True:
            question, buffer = _receive_any(connection, buffer)
            answer = self._handler(number, question)
            _send(connection, answer)
            with self._lock:
                self._sent_bytes += _num_bytes(answer.data)


class Connection:
    """One caller's connection to one service. `ask` and `answer` are apart, so that many services
    can be asked at once.
    """

    def __init__(self, address: Address, caller: int, timeout_seconds: float = 300.0) -> None:
        self._address = address
        try:
            self._socket = socket.create_connection(
                (address.host, address.port), timeout=CONNECT_SECONDS
            )
            self._socket.settimeout(timeout_seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_HELLO.pack(address.secret, caller))
        except OSError as error:
            raise self._failed(error) from error

    def ask(self, question: CallMessage) -> None:
        """Send a question. Raises `RankFailed` when the service has gone."""
        try:
            _send(self._socket, question)
        except OSError as error:
            raise self._failed(error) from error

    def answer(self, into: Tensor | None = None) -> CallMessage:
        """Wait for the answer to the oldest question; its tensor fills `into` [...]. That is
        contiguous and of the same number of bytes, or None where no tensor comes.

        Raises:
            RankFailed: the service has gone, did not answer in time, or sent another number of
                bytes.
        """
        try:
            kind, numbers, num_bytes = _receive_header(self._socket)
            if num_bytes != _num_bytes(into):
                raise RankFailed(
                    f"{num_bytes} bytes came from {self._where} where {_num_bytes(into)} were "
                    "expected"
                )
            if into is not None:
                _receive_into(self._socket, into)
        except OSError as error:
            raise self._failed(error) from error
        return CallMessage(kind, numbers, into)

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def _where(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    def _failed(self, error: OSError) -> RankFailed:
        return RankFailed(f"the server at {self._where} is gone or does not answer ({error})")


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _send(connection: socket.socket, message: CallMessage) -> None:
    numbers = (*message.numbers, *[0.0] * (NUM_NUMBERS - len(message.numbers)))
    data = None if message.data is None else message.data.detach().to("cpu")
    connection.sendall(_HEADER.pack(message.kind, *numbers, _num_bytes(data)))
    if data is not None and data.numel():
        connection.sendall(_bytes_of(data))


def _receive_header(connection: socket.socket) -> tuple[int, tuple[float, ...], int]:
    header = bytearray(_HEADER.size)
    _fill(connection, memoryview(header))
    kind, *numbers, num_bytes = _HEADER.unpack(header)
    return kind, tuple(numbers), num_bytes


def _receive_any(connection: socket.socket, buffer: Tensor) -> tuple[CallMessage, Tensor]:
    """The next message, its tensor as bytes in `buffer`, which grows where it must."""
    kind, numbers, num_bytes = _receive_header(connection)
    if num_bytes > buffer.numel():
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
    data = buffer[:num_bytes]
    if num_bytes:
        _fill(connection, _bytes_of(data))
    return CallMessage(kind, numbers, data), buffer


def _receive_into(connection: socket.socket, into: Tensor) -> None:
    landing = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
    if landing.numel():
        _fill(connection, _bytes_of(landing))
    if landing is not into:
        into.copy_(landing)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        num = connection.recv_into(view)
        if not num:
            raise ConnectionError("the other side has hung up")
        view = view[num:]
