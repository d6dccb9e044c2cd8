"""What torch's agent is asked for, with the versions of torch that plait runs on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from torch.distributed.launcher.api import LaunchConfig

from plait.launcher.agent import SHUTDOWN_SECONDS, shutdown_option


@dataclass
class OlderConfig:
    """The options of torch 2.11, in part."""

    run_id: str = ""


@dataclass
class NewerConfig(OlderConfig):
    shutdown_timeout: int | None = None


def test_the_agent_is_asked_to_end_ranks_soon_where_it_has_the_option() -> None:
    assert shutdown_option(NewerConfig) == {"shutdown_timeout": SHUTDOWN_SECONDS}
    assert shutdown_option(OlderConfig) == {}


def test_the_option_is_one_that_this_torch_takes() -> None:
    LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, **shutdown_option(LaunchConfig))


INTERRUPTED = """
import multiprocessing, os, signal, sys
from plait.launcher.agent import start_server

assert start_server() == "forkserver"
os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGINT)
for target, words in ((os.getpid, ()), (signal.raise_signal, (signal.SIGINT,))):
    process = multiprocessing.get_context("forkserver").Process(target=target, args=words)
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_ctrl_c_leaves_the_fork_server_alive_while_it_loads_and_its_processes_hear_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["0", "1"]
    assert done.stderr.count("KeyboardInterrupt") == 1
