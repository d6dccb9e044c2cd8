"""What `python = "module:function"` means, for models and for data alike.

The working directory is put at the end of `sys.path` and stays there: the console script, unlike
`python -m`, leaves it out, and the user's module may import its neighbours only when it is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from plait.errors import PlaitError, nearest


def load(reference: str, error: type[PlaitError]) -> Callable[..., Any]:
    """The function that `module:function` names; raises `error` with what is missing and what is
    there instead.
    """
    module_name, colon, function_name = reference.partition(":")
    if not (module_name and colon and function_name):
        raise error(f"python = {reference!r} is not of the form 'module:function'")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.append(os.getcwd())  # noqa: PTH109
    where = f"python = {reference!r}:"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if f"{module_name}.".startswith(f"{missing.name}."):
            raise error(
                f"{where} there is no module {missing.name!r} in {os.getcwd()} or installed"  # noqa: PTH109
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
