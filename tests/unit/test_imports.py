"""What is to be done once a module is loaded is done once, and then."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest

from plait.imports import when_loaded, while_loading
from plait.launcher.hearing import interrupt_waits


def test_it_is_done_as_the_module_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loaded_late.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    seen: list[int] = []
    when_loaded("loaded_late", lambda: seen.append(sys.modules["loaded_late"].VALUE))
    assert seen == []
    module = importlib.import_module("loaded_late")
    importlib.import_module("loaded_late")
    assert seen == [3]
    assert sys.meta_path == before
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    when_loaded("loaded_late", lambda: seen.append(4))
    assert seen == [3, 4]


def test_an_interrupt_waits_until_the_module_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ that runs Python while torch loads aborts the process at an exception."""
    body = "import signal\nsignal.raise_signal(signal.SIGINT)\nFOUND.append('loaded')\n"
    (tmp_path / "interrupted.py").write_text(f"from found import FOUND\n{body}")
    (tmp_path / "found.py").write_text("FOUND = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    while_loading("interrupted", interrupt_waits)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("interrupted")
    assert importlib.import_module("found").FOUND == ["loaded"]
    assert signal.getsignal(signal.SIGINT) is handler
