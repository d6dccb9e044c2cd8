"""The network interface that a process listens on: loopback on one machine, else the one that the
user names.

Neither torch's stores nor its process groups ask who connects, so each process that reaches their
ports is trusted. A store of torch listens on all interfaces unless it is handed a socket. A process
group listens where the machine's name leads unless a variable names an interface.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from plait.errors import ConfigError, RankFailed, RunError, nearest

if TYPE_CHECKING:  # a launcher starts its server before it loads torch
    from torch._C._distributed_c10d import Store, TCPStore

LOOPBACK = "127.0.0.1"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONNECT_TIMEOUT = timedelta(seconds=2)  # of one try
_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>
_LOCAL_NAMES = ("lo", "lo0")
_LOOPBACK_NET = "127."
_EPHEMERAL = 0
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)


def loopback_interface() -> str | None:
    """The name of the loopback interface; None where the system calls it otherwise."""
    names = interfaces()
    return next((name for name in _LOCAL_NAMES if name in names), None)


def interfaces() -> list[str]:
    """The names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        ConfigError: this machine has no such interface, or it has no address.
    """
    if interface not in interfaces():
        raise ConfigError(
            f"this machine has no network interface '{interface}' (cluster.interface); "
            f"{nearest(interface, interfaces())}"
        )
    if interface in _LOCAL_NAMES:
        return LOOPBACK
    import fcntl  # Unix alone has it

    asked = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
        except OSError as error:
            raise ConfigError(
                f"the network interface '{interface}' (cluster.interface) has no IPv4 address; "
                "name one that is up"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def variables_of(interface: str | None) -> dict[str, str]:
    """The variables by which torch's process groups learn the interface to listen on."""
    return {} if interface is None else dict.fromkeys(VARIABLES, interface)


def on_one_machine(variables: Mapping[str, str]) -> bool:
    """Whether all ranks of the world that torchrun's variables describe are on this machine. A
    process that belongs to no world is.
    """
    size = variables.get("WORLD_SIZE", "1")
    return size in ("1", variables.get("LOCAL_WORLD_SIZE"))


def listen_on(interface: str | None) -> None:
    """Make the process groups of this process listen on one interface from here on. A run on one
    machine listens on loopback, whatever is given; other runs on the given interface.

    Raises:
        ConfigError: this machine has no such interface, or it has no address.
    """
    if on_one_machine(os.environ):
        os.environ.update(variables_of(loopback_interface()))
    elif interface is not None:
        address_of(interface)
        os.environ.update(variables_of(interface))


def own_host(same_host: bool) -> str:
    """The address at which this process can be called. Loopback where all ranks share the host,
    else that of the interface it listens on.
    """
    if same_host:
        return LOOPBACK
    interface = os.environ.get(VARIABLES[0])
    if interface in interfaces():
        return address_of(interface)
    return socket.gethostbyname(socket.gethostname())


def listening_store(host: str = LOOPBACK, port: int = _EPHEMERAL) -> TCPStore:
    """A store that listens on the interface of one address, and on no other.

    Raises:
        RunError: the address cannot be reached from here. A store would try for minutes.
    """
    _check_reachable(host)
    from torch._C._distributed_c10d import TCPStore

    with contextlib.closing(socket.create_server((host, port), backlog=1024)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def _check_reachable(host: str) -> None:
    """Ask the system for the way to an address of this machine; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect((host, 9))
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise
            raise RunError(
                f"the ranks of this machine cannot meet, as {host} cannot be reached "
                f"({error.strerror}); bring its interface up, as by ip link set lo up"
            ) from error


def store_at(host: str, port: int, timeout: timedelta, is_given_up: Callable[[], bool]) -> TCPStore:
    """The store that another process keeps, which may be lost meanwhile.

    Torch's own connection would try for all of `timeout`. Here it begins anew every few seconds,
    until `is_given_up`. Errors: torch's own, when the time is over or it is given up.
    """
    from torch._C._distributed_c10d import TCPStore

    ends = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store = TCPStore(host, port, is_master=False, timeout=min(timeout, CONNECT_TIMEOUT))
        except RuntimeError:  # it cannot be reached, or does not answer
            if is_given_up() or time.monotonic() > ends:
                raise
        else:
            store.set_timeout(timeout)
            return store


def store_of_world(timeout: timedelta) -> Store | None:
    """The store that ranks meet at: rank 0 keeps it on one interface, or torchrun's agent does.

    None where there is no world, no interface is known, or agents of several machines keep the
    store.

    An agent of one machine keeps one store over its restarts. So the keys of each start stand
    apart: a rank would else connect to the address of one that is dead.

    Raises:
        RunError: the store's port is taken on that interface.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    variables = os.environ
    if "MASTER_PORT" not in variables:
        return None
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        if not on_one_machine(variables):
            return None
        address = (variables["MASTER_ADDR"], int(variables["MASTER_PORT"]))
        kept = TCPStore(*address, is_master=False, timeout=timeout)
        return PrefixStore(f"start/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}", kept)
    interface = variables.get(VARIABLES[0])
    port = int(variables["MASTER_PORT"])
    is_local = on_one_machine(variables)
    if not is_local and interface not in interfaces():
        return None  # on every rank: who meets in torch's own way counts all the others there
    if variables.get("RANK") != "0":
        host = LOOPBACK if is_local else variables["MASTER_ADDR"]
        return _store_of_rank_0(host, port, timeout)
    host = LOOPBACK if is_local else _address_to_listen_on(str(interface), variables["MASTER_ADDR"])
    try:
        store = listening_store(host, port)
    except OSError as error:
        raise _is_taken(host, port, error) from error
    store.set_timeout(timeout)
    return store


def open_store_of_world(timeout: timedelta) -> Store | None:
    """The store of ranks on several machines that know no interface: on all that rank 0 has.

    None where agents of several machines keep one: they call the roll themselves, again and again.
    Errors: `RunError` when the port is taken.
    """
    from torch._C._distributed_c10d import TCPStore

    variables = os.environ
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    address = (variables["MASTER_ADDR"], int(variables["MASTER_PORT"]))
    if variables["RANK"] != "0":
        return _store_of_rank_0(*address, timeout)
    try:
        return TCPStore(*address, is_master=True, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise _is_taken(*address, str(error).partition("\n")[0]) from error


def _store_of_rank_0(host: str, port: int, timeout: timedelta) -> TCPStore:
    """The store that rank 0 keeps; a line on stderr comes every so often while it does not answer.

    Errors: `RankFailed` when the time is over.
    """
    from torch._C._distributed_c10d import TCPStore

    from plait.comm.rollcall import NOTICE_SECONDS, repeating_notice

    rank = os.environ["RANK"]
    cure = (
        "start rank 0, or choose a MASTER_ADDR and a MASTER_PORT that reach it and that no other "
        "program uses"
    )

    def line(seconds: float) -> str:
        waits = f"rank {rank} has been waiting for {seconds:.0f} s"
        return f"{waits} for rank 0 to answer at {host}:{port}; {cure}"

    try:
        with repeating_notice(line, NOTICE_SECONDS):
            return TCPStore(host, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        seconds = timeout.total_seconds()
        raise RankFailed(
            f"rank {rank} got no answer of rank 0 at {host}:{port} in {seconds:.0f} s; {cure}"
        ) from error


def _is_taken(host: str, port: int, error: object) -> RunError:
    return RunError(f"rank 0 cannot listen at {host}:{port} ({error}); choose another MASTER_PORT")


def _address_to_listen_on(interface: str, told: str) -> str:
    """The address of rank 0's store: the interface's. Loopback has many, of which one is given."""
    if interface in _LOCAL_NAMES and told.startswith(_LOOPBACK_NET):
        return told
    return address_of(interface)
