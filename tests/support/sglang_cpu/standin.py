"""Modules that can be imported and do nothing: a call fails, except of a decorator, which leaves the function alone."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class Member(type):
    """A class of a stand-in: may be named, subclassed and asked for members; an instance has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(types.ModuleType):
    """A module, or a function of one, by what is done to it: its attributes are stand-ins too.

    ``decorators``: what its functions are when called.
    """

    decorators = False

    def __init__(self, name: str, decorators: bool) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.decorators = decorators

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = Member(name, (), {"__module__": self.__name__, "__init__": lambda *_, **__: None})
        else:
            value = StandIn(f"{self.__name__}.{name}", self.decorators)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **_: Any) -> Any:
        if not self.decorators:
            raise RuntimeError(f"{self.__name__} is a stand-in of tests/support/sglang_cpu: it cannot be called")
        return args[0] if args and callable(args[0]) else lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``package.anything`` as the attribute ``anything`` of the stand-in ``package``."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        """A spec for what is below the package."""
        below = name.startswith(self.package + ".")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if below else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """The attribute that is there already, or a new one."""
        parent, _, child = spec.name.rpartition(".")
        return getattr(sys.modules[parent], child)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def stand_in(package: str, version: str, decorators: bool = False) -> StandIn:
    """Put a stand-in where ``package`` is being imported."""
    module = StandIn(package, decorators)
    module.__spec__ = sys.modules[package].__spec__
    module.__version__ = version
    sys.modules[package] = module
    sys.meta_path.append(Finder(package))
    return module


def without_pinned_memory() -> None:
    """Without a GPU nothing can be pinned, and SGLang's adapters (``srt/lora``) ask for it all the same: here the wish
    is left out, in SGLang's processes alone, since torch knows its own functions by identity (`torch.device` contexts).
    """
    import torch

    if torch.cuda.is_available() or "sglang" not in sys.modules:
        return

    def unpinned(make: Any) -> Any:
        def call(*args: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*args, **named)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
