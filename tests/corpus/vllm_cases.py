"""What vLLM's tests of its parsers expect, without vLLM: only their tables are read.

Its test modules are imported with empty modules in the place of vLLM's own. Their tests do not run;
the outputs and expectations that they are parametrized with are plain values.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

#: Packages that the test modules import, and that their tables do not need.
ABSENT = frozenset(
    """
    vllm transformers regex xgrammar openai_harmony partial_json_parser mistral_common
    pytest_asyncio torch
    """.split()  # noqa: SIM905 - as a list it is longer
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An output of a model, and what vLLM's parser makes of it.

    Attributes:
        module: the test module, without ``test_`` and ``_parser``.
        name: of the test, and the number of its case.
        text: what the model wrote.
        calls: names and arguments as JSON; None: the test does not say.
        names: names of the calls, if it says no more.
        are_whole: True if it says only that there is a call, with JSON as its arguments.
        content: None: the test does not say.
        reasoning: None: there is none.
        tools: of the request, in the chat API's form.
    """

    module: str
    name: str
    text: str
    calls: tuple[tuple[str, str], ...] | None = None
    names: tuple[str, ...] | None = None
    are_whole: bool = False
    content: str | None = None
    reasoning: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def id(self) -> str:
        """Return a name for it."""
        return f"{self.module}: {self.name}"


class _Class(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Anything(metaclass=_Class):
    """Stands for any class of an absent package, and for what its methods return."""

    def __init__(self, *args: object, **fields: object) -> None:
        vars(self).update(fields)

    def __class_getitem__(cls, _: object) -> type:
        return cls


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Class(name, (_Anything,), {})
        setattr(self, name, made)
        return made


class _Absent(MetaPathFinder, Loader):
    """Finds empty modules for absent packages."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _without_packages(folder: Path) -> Iterator[None]:
    """Let imports find the folder's modules, and empty ones for absent packages."""
    before = dict(sys.modules)
    finder = _Absent()
    for name in before:
        if name.partition(".")[0] in ABSENT:
            del sys.modules[name]
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def read_cases(folder: Path, modules: Collection[str]) -> list[Case]:
    """Return the cases of these modules, without repetition."""
    cases: dict[tuple[object, ...], Case] = {}
    with _without_packages(folder):
        for path in sorted(folder.glob("tests/*/test_*_parser.py")):
            short = path.stem.removeprefix("test_").removesuffix("_parser")
            if short not in modules:
                continue
            module = importlib.import_module(f"tests.{path.parent.name}.{path.stem}")
            for case in _cases_of(module, short):
                cases.setdefault((case.module, case.text, repr(case.tools)), case)
    return list(cases.values())


def _cases_of(module: ModuleType, short: str) -> Iterator[Case]:
    tools = _tools_of(module)
    for value in vars(module).values():
        functions = [value]
        if inspect.isclass(value):
            functions = [*vars(value).values()]
            if "test_config" in vars(value):
                yield from _configured(value, short)
        for function in filter(inspect.isfunction, functions):
            yield from _parametrized(function, short, tools)


def _tools_of(module: ModuleType) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a module's requests."""
    fixture = getattr(module, "sample_tools", None)
    if fixture is None or inspect.isfunction(fixture):
        return ()
    make = fixture._get_wrapped_function()
    # Some modules have the tools of the chat API first, and others of the Responses API.
    request = SimpleNamespace(param="chat_completion")
    arguments = [request] if inspect.signature(make).parameters else []
    return tuple(_tool(tool) for tool in make(*arguments))


def _tool(tool: Any) -> Mapping[str, Any]:
    function = tool.function if hasattr(tool, "function") else tool
    fields = function if isinstance(function, Mapping) else vars(function)
    return {"name": fields["name"], "parameters": fields.get("parameters") or {}}


def _configured(tests: type, short: str) -> Iterator[Case]:
    """Yield the cases of vLLM's common tests, whose texts a fixture holds."""
    fixture: Any = vars(tests)["test_config"]
    try:
        config = fixture._get_wrapped_function()(None)
    except NotImplementedError:
        return
    arguments = json.dumps(config.single_tool_call_expected_args)
    names = tuple(config.parallel_tool_calls_names)
    single = (config.single_tool_call_expected_name, arguments)

    def case(name: str, text: str, **expected: Any) -> Case:
        return Case(module=short, name=f"{tests.__name__}: {name}", text=text, **expected)

    yield case("plain", config.no_tool_calls_output, calls=(), content=config.no_tool_calls_output)
    yield case("single", config.single_tool_call_output, calls=(single,))
    yield case("parallel", config.parallel_tool_calls_output, names=names)
    for name in ("various_data_types", "empty_arguments", "surrounding_text", "escaped_strings"):
        yield case(name, getattr(config, f"{name}_output"), are_whole=True)


def _parametrized(
    function: FunctionType, short: str, tools: tuple[Mapping[str, Any], ...]
) -> Iterator[Case]:
    """Yield the cases of a test's tables."""
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        rows = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
        for number, row in enumerate(rows):
            # A row may be one of ``pytest.param``, which is a tuple too.
            values = getattr(row, "values", row)
            if isinstance(values, tuple | list) and len(values) == len(keys):
                fields = dict(zip(keys, values, strict=True))
                yield from _case(f"{function.__name__} {number}", short, fields, tools)


def _case(
    name: str, short: str, fields: Mapping[str, Any], tools: tuple[Mapping[str, Any], ...]
) -> Iterator[Case]:
    expected = fields.get("param_dict")
    if isinstance(expected, Mapping) and isinstance(expected.get("output"), str):
        yield Case(
            module=short,
            name=name,
            text=expected["output"],
            content=expected.get("content") or "",
            reasoning=expected.get("reasoning") or "",
        )
    calls = _expected_calls(fields)
    if not isinstance(fields.get("model_output"), str) or calls is None:
        return
    yield Case(
        module=short,
        name=name,
        text=fields["model_output"],
        calls=calls,
        content=(fields["expected_content"] or "") if "expected_content" in fields else None,
        tools=tools,
    )


def _expected_calls(fields: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    """Return the calls that a row of a table expects; None if it says nothing of them."""
    if "expected_args_list" in fields:
        texts = map(json.dumps, fields["expected_args_list"])
        return tuple(zip(fields["expected_names"], texts, strict=True))
    if fields.get("expected_tool_calls") is None:
        return None
    functions = [getattr(call, "function", call) for call in fields["expected_tool_calls"]]
    return tuple((function.name, function.arguments) for function in functions)
