"""Something to do once a module is loaded, or while it is, without loading it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_loaded(name: str, then: Callable[[], None]) -> None:
    """Call `then` when the module has been loaded: now, or as the last part of its import."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        sys.meta_path.insert(0, _Awaited(name, partial(_ending_with, then)))
    else:
        then()


def while_loading(name: str, block: Callable[[], AbstractContextManager[None]]) -> None:
    """Have the module be loaded inside of a block. Too late once its import has begun."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Awaited(name, block))


@contextmanager
def _ending_with(then: Callable[[], None]) -> Iterator[None]:
    yield
    then()


class _Awaited(MetaPathFinder, Loader):
    """The finder of one module, which runs its code by the loader that it has anyway."""

    def __init__(self, name: str, block: Callable[[], AbstractContextManager[None]]) -> None:
        self._name = name
        self._block = block
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with this as its loader; None for any other module."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, as its own loader makes it."""
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code inside of the block."""
        loader = self._loader
        assert loader is not None
        spec = module.__spec__
        if spec is not None:
            spec.loader = loader
        module.__loader__ = loader
        with self._block():
            loader.exec_module(module)
