"""Changes what the modules of a loaded model do when they are called.

Python looks up ``__call__`` in a module's class, so the class of the instance is what changes.
Names and parameters of the modules stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

Methods = Mapping[str, Callable[..., Any]]
# _IS_REMOVED marks wrapper classes whose methods were taken away.
_IS_REMOVED = "_is_removed"


class WrappedCalls:
    """Methods of some modules, wrapped until ``remove`` is called or the context ends.

    Wrappings of the same module nest, and may be removed in any order.
    """

    def __init__(self, modules: Iterable[Any], wrap: Callable[[Any], Methods]) -> None:
        """Wrap each module once; if one fails, none stays wrapped.

        Args:
            modules: instances of any classes whose layout Python can extend.
            wrap: returns the wrapping methods for a class, by name. They look the wrapped methods
                up when they run (``original.__call__(self, ...)``), because inner wrappings may
                have been removed by then.
        """
        self._modules = list({id(module): module for module in modules}.values())
        self._wrappers: dict[type, tuple[type, Methods]] = {}
        try:
            for module in self._modules:
                module.__class__ = self._wrapper(type(module), wrap)
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Let the modules do what they would without this wrapping. Idempotent."""
        for wrapper, methods in self._wrappers.values():
            setattr(wrapper, _IS_REMOVED, True)
            for name in methods:
                delattr(wrapper, name)
        self._wrappers.clear()
        for module in self._modules:
            unwrapped = type(module)
            while _IS_REMOVED in vars(unwrapped):
                unwrapped = unwrapped.__bases__[0]
            if unwrapped is not type(module):
                module.__class__ = unwrapped
        self._modules.clear()

    def _wrapper(self, original: type, wrap: Callable[[Any], Methods]) -> type:
        if original not in self._wrappers:
            methods = wrap(original)
            wrapper = type(f"Wrapped{original.__name__}", (original,), dict(methods))
            self._wrappers[original] = wrapper, methods
        return self._wrappers[original][0]


def replace_class(module: Any, replacement: type, **state: Any) -> None:
    """Make a module an instance of ``replacement``, a subclass of its class, for good.

    ``state`` becomes items of the module; names with a leading underscore are no parameters.
    """
    assert issubclass(replacement, type(module)), f"{replacement} is no {type(module)}"
    module.__class__ = replacement
    for name, value in state.items():
        module[name] = value


def class_of(module: Any) -> tuple[str, str]:
    """Return the names of a module's Python module and class, by which kernels know it."""
    return type(module).__module__, type(module).__name__
