"""Integrations into other libraries.

`register_when_imported` makes transformers load packed checkpoints through Billfish. Importing
transformers' quantizers takes seconds, so an import hook on that module waits until something else
imports it. An import of transformers never fails because of it.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AWAITED = "transformers.quantizers.auto"


def register_when_imported() -> None:
    """Registers now if transformers' quantizers are imported, else once they are. Idempotent."""
    if AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    try:
        importlib.import_module("billfish.integrations.transformers").register()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"Billfish cannot register with this version of transformers ({error}); packed "
            "checkpoints go to transformers' own quantizers. Tested are 5.17.0 and 5.22.2.",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Finds AWAITED through the other finders and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AWAITED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(self, spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Runs the module with its own loader, removes the hook, then registers."""

    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self.finder, self.loader = finder, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        _register()
