"""A shell completes verbs, options and their words by the script that plait prints."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from plait.cli import main, table
from plait.cli.completion import SHELLS, options

BASH = shutil.which("bash")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [script("bash", capsys)]
    asked = {
        ("plait", "ev"): ["evaluate"],
        ("plait", "plan", "--ob"): ["--objective"],
        ("plait", "plan", "--objective", ""): ["time", "cost", "memory"],
        ("plait", "verify", "--dtype", "f"): ["float64", "float32", "fp8", "float16"],
        ("plait", "train", "small"): [],  # bash offers files
        ("plait", "--completion", "z"): ["zsh"],
        ("plait", "nothing", "--"): [],
    }
    for words in asked:
        given = " ".join(f"'{word}'" for word in words)
        lines.append(f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}")
        lines.append('COMPREPLY=(); _plait; echo "${COMPREPLY[*]}"')
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr
    answers = [line.split() for line in done.stdout.splitlines()]
    assert answers == list(asked.values())


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_option_is_in_a_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for verb in table.VERBS:
        assert verb in text
        assert all(one.name.lstrip("-") in text for one in options(verb))


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bsah"]) == 2
    assert "did you mean bash" in capsys.readouterr().err.replace("'", "")
    assert main(["--completion"]) == 2
    assert "--completion" in capsys.readouterr().err
    assert main(["--completion", "bash", "--json"]) == 0
    assert "complete -o default" in json.loads(capsys.readouterr().out)["script"]
