"""The file of a training step: which functions it has, read before any rank runs it.

`make() -> (model, batches, loss)` and `train_step(model, batch, loss)`, with an optional
`prepare(model)` that wraps the model once. A second function whose second parameter is `batches`
owns its loop, as a Trainer does, and makes several updates. Or `reference_step(number)` and
`parallel_step(number)` as `plait.verify.differential` takes them.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError, nearest
from plait.values import PyTree

SECOND = "train_step"
LOOP = "train"
PAIR = ("reference_step", "parallel_step")
MODULE = "plait_training_step"
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

Functions = Mapping[str, Callable[..., PyTree]]


@dataclass(frozen=True)
class FunctionSource:
    """Where the functions are: a file and the name of the second one, or pickled ones."""

    path: str = ""
    second: str = SECOND
    pickled: bytes = b""

    @property
    def name(self) -> str:
        """The step's name in reports."""
        return f"{Path(self.path).name}:{self.second}" if self.path else self.second

    def functions(self) -> Functions:
        """The functions by name, loaded in this process. The second is `train_step`.

        Errors: `ConfigError`, where the file does not define them.
        """
        if self.pickled:
            found: Functions = pickle.loads(self.pickled)
            return found
        return _loaded(Path(self.path), self.second)


def carried(
    make: Callable[[], PyTree],
    train_step: Callable[..., PyTree],
    prepare: Callable[[PyTree], PyTree] | None = None,
) -> FunctionSource:
    """The source of functions of this process, which travel to the ranks by value.

    A test's module need not be importable there.
    """
    import cloudpickle

    second = LOOP if is_loop(train_step) else SECOND
    functions: dict[str, Callable[..., PyTree]] = {"make": make, second: train_step}
    if prepare is not None:
        functions["prepare"] = prepare
    modules = {function.__module__ for function in functions.values()}
    named = [sys.modules[name] for name in modules if name in sys.modules and name != "__main__"]
    for module in named:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(functions)
    finally:
        for module in named:
            cloudpickle.unregister_pickle_by_value(module)
    return FunctionSource(second=getattr(train_step, "__name__", SECOND), pickled=pickled)


def parse(text: str) -> FunctionSource:
    """The source that `FILE.py[:function]` names. Runs nothing of the file.

    Errors: `ConfigError`, for a file or a function that is not there.
    """
    path, colon, second = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        path, second = text, ""
    if colon and not second and path == text.rstrip(":"):
        raise ConfigError(f"{text}: a function's name is missing after the colon")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file {path}; write FILE.py or FILE.py:function")
    names = _names(file)
    names |= {second, SECOND, "make"} if "*" in names else set()  # it has what is imported so
    if not second and set(PAIR) <= names and "make" not in names:
        return FunctionSource(str(file.resolve()), PAIR[1])
    wanted = second or (LOOP if LOOP in names and SECOND not in names else SECOND)
    for name in ("make", wanted):
        if name not in names:
            raise ConfigError(_lacks(file, name, names))
    return FunctionSource(str(file.resolve()), wanted)


def _names(file: Path) -> set[str]:
    """The names that the top level of a file binds."""
    try:
        root = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno}: {error.msg}") from error
    except (UnicodeDecodeError, OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    names: set[str] = set()
    for node in _at_the_top(root):
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _at_the_top(root: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a file but those inside of functions and classes, whose names are their own."""
    left: list[ast.AST] = [root]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, DEFINITIONS):
            left.extend(ast.iter_child_nodes(node))


def _lacks(file: Path, name: str, names: set[str]) -> str:
    meaning = {
        "make": "make() -> (model, batches, loss)",
        PAIR[0]: "reference_step(number)",
        PAIR[1]: "parallel_step(number)",
    }.get(name, f"{name}(model, batch, loss)")
    near = f"; {nearest(name, sorted(names))}" if names else ""
    return f"{file} defines no {meaning}{near}"


def is_loop(function: Callable[..., PyTree]) -> bool:
    """Whether a function takes all batches at once and makes several updates itself."""
    parameters = list(inspect.signature(function).parameters)
    return len(parameters) > 1 and parameters[1] == "batches"


def _loaded(file: Path, second: str) -> Functions:
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    functions = {}
    names = PAIR if second == PAIR[1] else ("make", second)
    for name in names:
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigError(f"{file}: {name} is no function")
        if name == second and second != PAIR[1]:
            name = LOOP if is_loop(function) else SECOND  # noqa: PLW2901 - by what it takes
        functions[name] = function
    prepare = getattr(module, "prepare", None)
    if callable(prepare):
        functions["prepare"] = prepare
    return functions
