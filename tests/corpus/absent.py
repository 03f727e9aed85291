"""Stands in for packages that tests of others import, so that the tests need not be changed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: What vLLM's tests of parsers import and this environment lacks, or must not load.
VLLM = frozenset(
    [
        "vllm",
        "transformers",
        "xgrammar",
        "openai_harmony",
        "partial_json_parser",
        "mistral_common",
        "torch",
    ]
)
#: ``Provide``: returns what a module has by a name; None: any class will do.
Provide = Callable[[str, str], object]


class _Class(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Anything(metaclass=_Class):
    """Stands for any class of an absent package, and for what its methods return."""

    def __init__(self, *args: object, **fields: object) -> None:
        vars(self).update(fields)

    def __class_getitem__(cls, _: object) -> type:
        return cls


def nothing(module: str, name: str) -> object:
    """Provide nothing."""
    return None


class _Module(ModuleType):
    def __init__(self, name: str, provide: Provide) -> None:
        super().__init__(name)
        self._provide = provide

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._provide(self.__name__, name)
        value = _Class(name, (Anything,), {}) if value is None else value
        setattr(self, name, value)
        return value


class AbsentPackages(MetaPathFinder, Loader):
    """Finds modules of absent packages, in which every name exists."""

    def __init__(self, packages: Collection[str], provide: Provide = nothing) -> None:
        """Find modules of ``packages``, with the values that ``provide`` returns."""
        self._packages = packages
        self._provide = provide

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """See ``MetaPathFinder``."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See ``Loader``."""
        return _Module(spec.name, self._provide)

    def exec_module(self, module: ModuleType) -> None:
        """See ``Loader``."""
