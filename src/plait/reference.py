"""The meaning of `python = "module:function"`, for models, data and losses alike.

A module is looked for beside the config file, then in the working folder, then among what is
installed. The folders stay on `sys.path`. The user's module may import its neighbours only when it
is called. Ranks inherit the path from their parent process.
"""

from __future__ import annotations

import glob
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, nearest
from plait.values import JsonMapping, JsonObject

KEYS = (("model", "python"), ("data", "python"), ("train", "loss"))
"""Where a config may name a function: section and key."""

_FORGETTING = threading.Lock()


def look_beside(config: str | Path, tables: JsonMapping) -> None:
    """Let modules beside this config file come first, then those of the working folder.

    A config that names no module leaves the search as it is.
    """
    sections = [(tables.get(section), key) for section, key in KEYS]
    if not any(isinstance(table, Mapping) and table.get(key) for table, key in sections):
        return
    working = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    for folder in (working, str(Path(config).resolve().parent)):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)


SOURCE: JsonMapping = {"files": None, "path": None, "tokenizer": None}
DATA: JsonMapping = {**SOURCE, "mixture": SOURCE}
PATHS: JsonMapping = {
    "model": {"config": None, "weights": None},
    "adapter": {"weights": None},
    "data": DATA,
    "eval": {"data": DATA},
}
"""Where a config may name folders and files: keys of tables, and of tables inside them."""


def beside(config: str | Path, tables: JsonMapping) -> JsonObject:
    """Tables whose relative paths are those beside this config file.

    A path or glob that finds nothing there stays as it is: relative to the working folder.
    """
    found: JsonObject = _beside(Path(config).resolve().parent, tables, PATHS)
    return found


def _beside(folder: Path, value: Any, keys: Any) -> Any:
    """A value with the paths at the keys looked for in a folder."""
    if isinstance(value, Mapping) and isinstance(keys, Mapping):
        found = {name: _beside(folder, value[name], keys[name]) for name in keys if name in value}
        return {**value, **found}
    if isinstance(value, (list, tuple)):
        return [_beside(folder, one, keys) for one in value]
    if keys is not None or not isinstance(value, (str, os.PathLike)) or Path(value).is_absolute():
        return value
    path = str(folder / value)
    is_there = Path(path).exists() or glob.glob(path, recursive=True)  # noqa: PTH207 - any folder
    return path if is_there else value


def load(reference: str, error: type[PlaitError], key: str = "python") -> Callable[..., Any]:
    """The function that `module:function` names at a key of the config.

    Errors: `error` with what is missing and what is there instead.
    """
    module_name, colon, function_name = reference.partition(":")
    if not (module_name and colon and function_name):
        raise error(f"{key} = {reference!r} is not of the form 'module:function'")
    working = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if working not in sys.path:
        sys.path.append(working)
    where = f"{key} = {reference!r}:"
    _forget_namesake(module_name.partition(".")[0])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if f"{module_name}.".startswith(f"{missing.name}."):
            raise error(
                f"{where} there is no module {missing.name!r} in {_folders()} or installed"
            ) from missing
        raise error(
            f"{where} {module_name!r} imports {missing.name!r}, which is not installed"
        ) from missing
    except Exception as failure:
        raise error(
            f"{where} importing {module_name!r} failed: {type(failure).__name__}: {failure}"
        ) from failure
    function = getattr(module, function_name, None)
    if function is None:
        public = [
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        ]
        hint = nearest(function_name, public) if public else "it defines no functions"
        raise error(f"{where} {module_name!r} has no {function_name!r}; {hint}")
    if not callable(function):
        raise error(f"{where} {function_name!r} is a {type(function).__name__}, not a function")
    return function


def _forget_namesake(name: str) -> None:
    """Drop a module that was loaded from beside another config and has the name of one that comes
    first now.
    """
    with _FORGETTING:
        loaded = sys.modules.get(name)
        origin = getattr(loaded, "__file__", None)
        if origin is None:
            return
        _see_new_files()
        spec = PathFinder.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin).samefile(origin):
            return
        for known in list(sys.modules):
            if known.partition(".")[0] == name:
                del sys.modules[known]


def _see_new_files() -> None:
    """Let the folders of `sys.path` be read anew.

    `importlib.invalidate_caches` goes through all finders of the process. An import in another
    thread may add one meanwhile, which is an error there. Ranks may be threads.
    """
    for folder in list(sys.path):
        finder = sys.path_importer_cache.get(folder)
        if finder is not None and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def _folders() -> str:
    """The folder of the config file, where there is one, and the working folder."""
    working = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    first = sys.path[0] or working
    return working if first == working else f"{first}, in {working}"
