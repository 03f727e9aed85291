"""The generator of docs/python.md: the classes of the package, from signatures and docstrings.

PYTHONPATH=. python scripts/write_python_docs.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm import (
    LLM,
    BeamParams,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)
from mlx_parallm.client import (
    Actions,
    MezoClient,
    NetsClient,
    Prediction,
    RLClient,
    SessionsClient,
    SpeechClient,
    SpokenSegment,
    SyncRLClient,
    TrainingClient,
    Transcript,
)
from mlx_parallm.offline.beams import BeamSearchOutput, BeamSearchSequence
from mlx_parallm.offline.completions import CompletionOutput, RequestOutput

TARGET = Path(__file__).resolve().parent.parent / "docs" / "python.md"
CLASSES: tuple[type, ...] = (
    *(LLM, SamplingParams, StructuredOutputsParams, RequestOutput, CompletionOutput),
    *(BeamParams, BeamSearchParams, BeamSearchOutput, BeamSearchSequence),
    *(RLClient, SessionsClient, MezoClient, TrainingClient, NetsClient, Actions, Prediction),
    *(SpeechClient, Transcript, SpokenSegment, SyncRLClient),
)
# PARTS: the clients that are attributes of ``RLClient``, which makes them.
PARTS = {
    "mezo": MezoClient,
    "training": TrainingClient,
    "nets": NetsClient,
    "speech": SpeechClient,
}
# SECTION: those called Example are left out, because the guides have examples that are run.
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Example|Yields):")
INTRODUCTION = """\
# Python

The classes of `mlx_parallm`, which has the engine without a server, and of `mlx_parallm.client`.
The client is for programs that speak to a server, and needs no MLX.
Guides are [getting started](getting-started.md#without-a-server) and [the client](client.md).

```python
from mlx_parallm import LLM, BeamParams, BeamSearchParams, SamplingParams, StructuredOutputsParams
from mlx_parallm.client import RLClient, SyncRLClient
```

Errors of the engine are subclasses of `mlx_parallm.types.errors.ParallmError`.
Those of the client are subclasses of `mlx_parallm.client.ClientError`.
`make docs` generates this page from the docstrings.
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION, *("\n".join(class_lines(kind)) for kind in CLASSES)]
    return "\n".join(parts)


def class_lines(kind: type) -> Iterator[str]:
    """Yield the lines of a class's section."""
    documented = Docstring(inspect.getdoc(kind) or "")
    yield f"## {kind.__name__}\n"
    yield from documented.text
    if dataclasses.is_dataclass(kind):
        yield from field_table(kind, documented.items("Attributes"))
    elif kind not in (SessionsClient, *PARTS.values()):
        init = kind.__init__
        yield from call_lines(kind.__name__, init, Docstring(inspect.getdoc(init) or ""))
        yield from bullets(documented.items("Attributes"))
    if issubclass(kind, SessionsClient) and kind is not SessionsClient:
        yield f"It has the methods of [{SessionsClient.__name__}](#sessionsclient).\n"
    if kind is SyncRLClient:
        yield f"Its methods are those of [{RLClient.__name__}](#rlclient)"
        *links, last = [
            f"[{each.__name__}](#{each.__name__.lower()}) in `{name}`"
            for name, each in PARTS.items()
        ]
        yield f"and those of {', '.join(links)} and {last}, without `await`.\n"
        return
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        documented = Docstring(inspect.getdoc(member) or "")
        if isinstance(member, property):
            yield f"### {kind.__name__}.{name}\n"
            yield from documented.text
        elif inspect.isfunction(member):
            yield f"### {kind.__name__}.{name}\n"
            yield from call_lines(prefix(member) + name, member, documented)


def prefix(function: Callable[..., Any]) -> str:
    """Return what is written before a call."""
    if inspect.iscoroutinefunction(function):
        return "await "
    return "async for … in " if inspect.isasyncgenfunction(function) else ""


def call_lines(name: str, function: Callable[..., Any], documented: Docstring) -> Iterator[str]:
    """Yield the call of a function, its text, its arguments, its result and its errors."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    bare = signature.replace(
        parameters=[each.replace(annotation=each.empty) for each in parameters],
        return_annotation=inspect.Signature.empty,
    )
    result = signature.return_annotation
    gives = "" if result in ("None", signature.empty) else f" → `{result}`"
    yield f"`{name}{bare}`{gives}\n"
    yield from documented.text
    texts = documented.items("Args")
    if parameters:
        # Methods without a section of arguments say in their first line what these are.
        yield "| argument | type | meaning |" if texts else "| argument | type |"
        yield "|---|---|---|" if texts else "|---|---|"
    for each in parameters:
        stars = "**" if each.kind is each.VAR_KEYWORD else ""
        text = texts.get(stars + each.name, "").replace("|", "\\|")
        meaning = f" {text} |" if texts else ""
        yield f"| `{stars}{each.name}` | {cell(each.annotation)} |{meaning}"
    if parameters:
        yield ""
    yield from documented.paragraph("Returns")
    errors = documented.items("Raises")
    if errors:
        yield "Raises:\n"
    yield from bullets(errors)


def field_table(kind: type, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of a dataclass's fields."""
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for each in dataclasses.fields(kind):
        default = "" if each.default is dataclasses.MISSING else f"`{each.default!r}`"
        text = texts.get(each.name, "").replace("|", "\\|")
        yield f"| `{each.name}` | {cell(each.type)} | {default} | {text} |"
    yield ""


def cell(annotation: object) -> str:
    """Return a type as a table's cell."""
    return f"`{annotation}`".replace("|", "\\|")


def bullets(items: Mapping[str, str]) -> Iterator[str]:
    """Yield a list of names and their texts."""
    for name, text in items.items():
        yield f"- `{name}`: {text}"
    if items:
        yield ""


class Docstring:
    """A docstring in Google's form.

    Attributes:
        text: its lines before the first section, as paragraphs of a sentence a line.
    """

    def __init__(self, text: str) -> None:
        self._sections: dict[str, list[str]] = {"": []}
        section = ""
        for line in text.splitlines():
            match = SECTION.fullmatch(line)
            if match:
                section = match[1]
            elif section and line and not line.startswith(" "):
                section = ""
            if not match:
                self._sections.setdefault(section, []).append(line)
        self.text = paragraphs(self._sections[""])

    def items(self, section: str) -> dict[str, str]:
        """Return the texts of a section by the names that they begin with."""
        lines = inspect.cleandoc("\n".join(self._sections.get(section, [])))
        starts = re.split(r"^(\S+): ", lines, flags=re.MULTILINE)[1:]
        pairs = zip(starts[::2], starts[1::2], strict=True)
        return {name: markdown(" ".join(text.split())) for name, text in pairs}

    def paragraph(self, section: str) -> list[str]:
        """Return a section's text as a paragraph."""
        text = paragraphs([line.strip() for line in self._sections.get(section, [])])
        return [f"Returns: {text[0]}", *text[1:]] if text else []


def paragraphs(lines: list[str]) -> list[str]:
    """Return lines of Markdown: a sentence a line, paragraphs and lists apart."""
    text = markdown("\n".join(lines).strip())
    blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip()]
    return [
        re.sub(r"(?<=\\.) (?=[A-Z`])", "\n", " ".join(block.split())) + "\n" for block in blocks
    ]


def markdown(text: str) -> str:
    """Return a docstring's markup as Markdown, with links to pages of the docs."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
