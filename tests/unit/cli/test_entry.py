"""The door of the command line: messages, exit codes, and where each goes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from plait.cli import Answer, main, table
from plait.errors import PlanError, RunError
from plait.launcher import joined_world


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A verb `train` whose behaviour the test chooses by setting `.run`."""
    module = types.SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--steps", type=int, default=1),
        run=lambda arguments: Answer({"steps": arguments.steps}, f"{arguments.steps} steps"),
    )
    monkeypatch.setattr(table, "load", lambda name: module)
    return module


def _raise(error: BaseException) -> Answer:
    raise error


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    out = capsys.readouterr().out
    for name in table.VERBS:
        line = next(line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert line.endswith(table.VERBS[name])


def test_an_answer_is_shown_or_printed_as_json(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--steps", "3"]) == 0
    assert capsys.readouterr().out == "3 steps\n"
    assert main(["train", "--steps", "3", "--json"]) == 0
    assert capsys.readouterr().out == '{"steps": 3}\n'


def test_no_is_exit_code_1(verb: types.SimpleNamespace) -> None:
    verb.run = lambda arguments: Answer({}, ok=False)
    assert main(["train"]) == 1


def test_under_json_whatever_a_verb_prints_goes_to_stderr(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = lambda arguments: (print("chatter"), Answer({"a": float("nan")}))[1]
    assert main(["train", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": None}
    assert captured.err == "chatter\n"


@pytest.mark.parametrize(
    ("error", "code"), [(PlanError("no such axis"), 2), (RunError("it broke"), 1)]
)
def test_a_user_error_is_one_message_and_its_exit_code(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    verb.run = lambda arguments: _raise(error)
    assert main(["train"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"plait train: {error}\n")


def test_under_json_an_error_is_an_object_too(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = lambda arguments: _raise(PlanError("no such axis"))
    assert main(["train", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "no such axis", "kind": "PlanError"}
    assert captured.err == "plait train: no such axis\n"


def test_a_rank_whose_variables_are_garbled_is_told_so_in_one_sentence(
    verb: types.SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message itself says the rank, which nobody knows here."""
    told = {"RANK": "", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    verb.run = lambda arguments: Answer({"rank": joined_world()})
    assert main(["train", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kind"] == "WorldSizeError"
    assert captured.err.startswith("plait train: the variable RANK is '', which is no whole number")
    assert len(captured.err.splitlines()) == 1


def test_a_traceback_is_shown_with_debug_only(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = lambda arguments: _raise(ZeroDivisionError("by zero"))
    assert main(["train"]) == 1
    quiet = capsys.readouterr().err
    assert quiet.startswith("plait train: ZeroDivisionError: by zero (at ")
    assert "Traceback" not in quiet
    assert main(["train", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = lambda arguments: _raise(KeyboardInterrupt())
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "plait: stopped by Ctrl-C\n"


@pytest.mark.parametrize(
    ("end", "code", "failure"),
    [
        (KeyboardInterrupt(), 130, {"error": "stopped by Ctrl-C", "kind": "SIGINT"}),
        (SystemExit(143), 143, {"error": "ended by SIGTERM, as stderr says", "kind": "SIGTERM"}),
        (SystemExit(138), 138, {"error": "ended by SIGUSR1, as stderr says", "kind": "SIGUSR1"}),
    ],
)
def test_under_json_the_end_by_a_signal_is_an_object_too(
    verb: types.SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    end: BaseException,
    code: int,
    failure: dict[str, str],
) -> None:
    """But not a second one, after the address of a server."""
    verb.run = lambda arguments: _raise(end)
    assert main(["train", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == failure
    verb.run = lambda arguments: Answer({"url": "here"}, serve=lambda: _raise(end))
    assert main(["train", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"url": "here"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is not a verb of plait; did you mean 'train'?"),
        (["--jsn"], "the verb comes first"),
    ],
)
def test_an_unknown_verb_names_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stpes", "3"], "unknown option --stpes; did you mean '--steps'?"),
        (["--stpes=3"], "unknown option --stpes; did you mean '--steps'?"),
        (["--ste", "3"], "unknown option --ste; did you mean '--steps'?"),
        (["--steps", "many"], "--steps must be a whole number, not 'many'; see plait train"),
        (["one-too-many"], "'one-too-many' is one argument too many"),
    ],
)
def test_an_unknown_option_names_the_nearest(
    verb: types.SimpleNamespace, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_key_without_set_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gpt.toml", "train.lr=0.1"]) == 2
    assert "a key of the config is set by --set train.lr=0.1" in capsys.readouterr().err


def test_help_of_a_verb_is_exit_code_0(
    verb: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--help"]) == 0
    assert "--steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(table.VERBS))
def test_every_verb_keeps_the_interface_and_has_no_option_of_its_own_for_json(name: str) -> None:
    module = table.load(name)
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    module.add_arguments(parser)  # a second --json would be an error
    assert callable(module.run)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plait ")
    assert sys.modules["plait.cli"]


def test_help_breaks_no_name_at_its_hyphen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--help"]) == 0
    assert "megatron-\n" not in capsys.readouterr().out


@pytest.mark.parametrize("in_a_world", [False, True])
def test_a_rank_of_torchrun_leaves_without_the_interpreters_end(in_a_world: bool) -> None:
    """It takes a while and may fail, which its agent takes for a rank that works or is lost."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    program = (
        "import atexit, sys; atexit.register(print, 'the end'); sys.argv[1:] = ['--version'];"
        "from plait.cli import command; command()"
    )
    variables = {name: value for name, value in os.environ.items() if name not in world}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, **(world if in_a_world else {})},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plait ")
    assert lines[1:] == ([] if in_a_world else ["the end"])


INTERRUPTED = """
import atexit, sys, types
from plait.cli import command, table

def run(arguments):
    exec("import signal; signal.raise_signal(signal.SIGINT)")

atexit.register(print, "the end", file=sys.stderr)
table.load = lambda name: types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
sys.argv[1:] = ["train", "--json"]
command()
"""


def test_ctrl_c_inside_of_exec_is_exit_code_130_too(tmp_path: Path) -> None:
    """`python -m` ends by the signal then, whatever the exit code. Dataclasses are made so."""
    (tmp_path / "interrupted_program.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "interrupted_program"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["kind"]) == (130, "SIGINT")
    assert done.stderr == "plait: stopped by Ctrl-C\nthe end\n"


def _ended(words: str, *, buffered: bool = False) -> tuple[str, str]:
    """What a line of the shell prints, where $P is plait: stdout and stderr."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    variables |= {"P": f"{sys.executable} -m plait"} | (
        {} if buffered else {"PYTHONUNBUFFERED": "1"}
    )
    done = subprocess.run(
        ["bash", "-c", words], env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("schedule 1f1b", 0),
        ("schedule 1f1b --json", 0),
        ("schedule --help", 0),
        ("--help", 0),
        ("estimate no-such-file --json", 2),
    ],
)
def test_a_reader_that_has_gone_is_no_failure(words: str, code: int, buffered: bool) -> None:
    line = f"$P {words} > >(exec true); echo $? >&2"
    err = _ended(line, buffered=buffered)[1].splitlines()
    assert err[-1] == str(code)
    assert len(err) == (2 if code else 1)  # a refusal is said on stderr, once


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("words", ["schedule 1f1b", "schedule 1f1b --json", "--help"])
def test_a_full_disk_behind_stdout_is_one_sentence(words: str, buffered: bool) -> None:
    out, err = _ended(f"exec 3>&1; $P {words} >/dev/full; echo $? >&3", buffered=buffered)
    assert out == "1"
    assert err.count("\n") == 1
    assert "cannot be written to stdout: No space left on device; free space" in err


def test_a_closed_stdout_gets_nothing_and_neither_does_stderr() -> None:
    assert _ended("exec 3>&1; $P schedule 1f1b --json >&-; echo $? >&3") == ("0", "")
    assert _ended("exec 3>&1; $P estimate no-such-file --json >&- 2>&-; echo $? >&3") == ("2", "")


@pytest.mark.parametrize(("rank", "objects"), [("0", 1), ("2", 0)])
def test_of_ranks_that_refuse_the_main_process_prints_the_object(rank: str, objects: int) -> None:
    world = f"RANK={rank} WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
    out, err = _ended(f"{world} $P estimate no-such-file --json")
    assert len(out.splitlines()) == objects
    assert f"(rank {rank})" in err


@pytest.mark.parametrize("words", ["schedule 1f1b", "schedule 1f1b --json"])
def test_of_ranks_with_the_same_answer_the_main_process_prints_it(words: str) -> None:
    world = "WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
    torchrun = f"{world} TORCHELASTIC_RUN_ID=1"
    spoken = _ended(f"$P {words}")
    assert _ended(f"RANK=0 {torchrun} $P {words}") == spoken
    assert _ended(f"RANK=2 {torchrun} $P {words}; echo $?") == ("0", "")
    assert _ended(f"RANK=2 {world} $P {words}") == spoken  # a machine of a job, by hand
