"""Stands in for torchvision, which SGLang imports at its start and text models never call.

Any name and any submodule can be imported. The wheel's operators do not load beside a CPU build of torch.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.28.0"


class _ClassOfNames(type):
    """A class whose members exist: enums are read at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything:
    """Class, decorator or function, as far as importing goes."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        is_decorator = len(arguments) == 1 and not named and callable(arguments[0])
        return arguments[0] if is_decorator else self

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        loaded = sys.modules.get(f"{self.__name__}.{name}")
        if loaded is not None:
            return loaded
        value = _ClassOfNames(name, (_Anything,), {"__module__": self.__name__}) if name[0].isupper() else _Anything()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
