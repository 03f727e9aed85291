"""Renders docs/api-reference.md from the OpenAPI document, its examples and the routes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from mlx_parallm.api.app import SLICES, STORING_SLICES, create_app, examples_of
from mlx_parallm.api.http.declared import RouteFacts
from mlx_parallm.api.http.openapi import (
    FORM,
    JSON,
    Example,
    ExampleRequest,
    form_example,
    operations,
)
from mlx_parallm.api.http.routing import declared_routes
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.units import readable_bytes
from scripts.compact_json import compact_json
from scripts.markdown_links import anchor
from tests.fake_engine import FakeEngine

MAX_TEXT = 160
MAX_ITEMS = 8
CUT = "…"
SCHEMAS = "#/components/schemas/"

INTRODUCTION = """\
# API reference

Every operation of the OpenAPI document (`/openapi.json`, shown at `/docs`), with an example.
A test sends the examples to a server of the embedded models and compares the answers.
Its speech model hears the same sentence in every recording.
That server may read the folder `/srv/models` (`--allowed-adapter-roots`).
Ids, times and durations in them are fixed; `…` stands where something long was cut.
What routes have in common (headers, errors, limits) and how they are used is in [api.md](api.md).

*Access* says which key opens a route where keys are set: none (`open`), any (`key`), or the
admin key (`admin`).
*Batchable* requests may stand in a file of [/v1/batches](batch-api.md).
Sizes are the defaults of their settings ([configuration.md](configuration.md)).

`make docs` generates this page.
"""


def render() -> str:
    """Return the whole page."""
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(data_dir=folder)
        app = create_app(FakeEngine(), config)
    document = app.openapi()
    facts = {
        f"{method} {route.path_format}": route.facts
        for route in declared_routes(app)
        for method in route.methods
    }
    page = Page(document, facts, examples_of(SLICES + STORING_SLICES), config)
    return f"{INTRODUCTION}\n" + "\n".join(page.lines()) + "\n"


@dataclass(slots=True)
class Page:
    """The data that all sections of the page share.

    Attributes:
        document: of OpenAPI.
        facts: what routes declare, by "METHOD path".
        examples: by the same.
        config: whose limits are shown.
        shown: the operation under which the fields of a schema stand.
        types: the schemas that fields named, for the end of the page.
    """

    document: dict[str, Any]
    facts: Mapping[str, RouteFacts]
    examples: Mapping[str, Example]
    config: ServerConfig
    shown: dict[str, str] = field(default_factory=dict)
    types: dict[str, None] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines after the introduction."""
        for tag in self.document["tags"]:
            yield from (f"## {tag['name'].capitalize()}", "", tag["description"], "")
            for key, operation in operations(self.document):
                if operation["tags"] == [tag["name"]]:
                    yield from self._operation(key, operation)
        yield from ("## Types", "", "Objects that the fields above name.", "")
        described: set[str] = set()
        while names := [name for name in self.types if name not in described]:
            for name in names:
                described.add(name)
                schema = self.document["components"]["schemas"][name]
                yield from (f"### {name}", "", *_sentences(schema.get("description", "")))
                yield from self._table(schema)

    def _operation(self, key: str, operation: dict[str, Any]) -> Iterator[str]:
        yield from (f"### {key}", "", *_sentences(operation.get("description", "")))
        facts, example = self.facts[key], self.examples.get(key)
        limit = facts.body_limit.size(self.config)
        has_body = "requestBody" in operation
        parts = [f"Access: {facts.access.value}"]
        parts += [f"body: at most {readable_bytes(limit)}"] if has_body else []
        parts += ["batchable"] if facts.batchable else []
        yield from (f"{'; '.join(parts)}.", "")
        if parameters := operation.get("parameters"):
            yield from ("| parameter | in | type | default |", "|---|---|---|---|")
            yield from (self._parameter(parameter) for parameter in parameters)
            yield ""
        if has_body:
            yield from self._fields(key, operation["requestBody"]["content"])
        if example is not None:
            yield from _request(key, example.request)
            yield from _answer(example)

    def _parameter(self, parameter: dict[str, Any]) -> str:
        schema = parameter["schema"]
        cells = (f"`{parameter['name']}`", parameter["in"], self._type(schema), _default(schema))
        return _row(*cells)

    def _fields(self, key: str, content: dict[str, Any]) -> Iterator[str]:
        media_type = JSON if JSON in content else next(iter(content))
        others = [name for name in content if name != media_type]
        if others:
            yield from (f"Also taken as {', '.join(f'`{name}`' for name in others)}.", "")
        schema = content[media_type]["schema"]
        for option in schema.get("anyOf", [schema]):
            yield from self._body(key, option)

    def _body(self, key: str, schema: dict[str, Any]) -> Iterator[str]:
        name = schema.get("$ref", "").removeprefix(SCHEMAS)
        if name and name in self.shown:
            other = self.shown[name]
            yield from (f"The fields are those of [{other}](#{anchor(other)}).", "")
            return
        if name:
            self.shown[name] = key
            schema = self.document["components"]["schemas"][name]
        if "properties" in schema:
            yield from self._table(schema)

    def _table(self, schema: dict[str, Any]) -> Iterator[str]:
        required = schema.get("required", ())
        if not schema.get("properties"):
            return
        yield from ("| field | type | default | meaning |", "|---|---|---|---|")
        for name, item in schema["properties"].items():
            default = "required" if name in required else _default(item)
            yield _row(f"`{name}`", self._type(item), default, item.get("description", ""))
        yield ""

    def _type(self, schema: dict[str, Any]) -> str:
        """Return a schema's type in a few words, and note the objects that it names."""
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(SCHEMAS)
            target = self.document["components"]["schemas"][name]
            if "properties" not in target:
                return self._type(target)
            self.types[name] = None
            return f"[{name}](#{name.lower()})"
        if "enum" in schema:
            values = [
                value if isinstance(value, str) else json.dumps(value) for value in schema["enum"]
            ]
            return ", ".join(f"`{value}`" for value in values)
        if "const" in schema:
            return f"`{schema['const']}`"
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            names = dict.fromkeys(self._type(option) for option in options)
            return " or ".join(name for name in names if name != "null")
        if schema.get("type") == "array":
            return f"list of {self._type(schema.get('items', {}))}"
        return schema.get("type", "any")


def shortened(value: Any) -> Any:
    """Return a value with long texts and lists of numbers cut."""
    match value:
        case dict():
            kept = dict(list(value.items())[:MAX_ITEMS]) if _is_long(value) else value
            cut = {CUT: CUT} if kept is not value else {}
            return {key: shortened(item) for key, item in kept.items()} | cut
        case list():
            kept = value[:MAX_ITEMS]
            return [shortened(item) for item in kept] + [CUT] * (len(value) > MAX_ITEMS)
        case str() if len(value) > MAX_TEXT:
            return value[:MAX_TEXT] + CUT
    return value


def _is_long(table: dict[str, Any]) -> bool:
    """True if it is a table of many entries and not an object of many fields."""
    return len(table) > MAX_ITEMS and all("." in key for key in table)


def _request(key: str, request: ExampleRequest) -> Iterator[str]:
    method, path = key.split(" ", 1)
    for name, value in request.path.items():
        path = path.replace(f"{{{name}}}", value)
    query = f"?{urlencode(request.query)}" if request.query else ""
    yield from (f"Request: `{method} {path}{query}`", "")
    if request.json is not None:
        yield from _block(JSON, request.json)
    if request.form is not None:
        yield from (f"As `{FORM}`:", "")
        yield from _block(JSON, form_example(request.form))


def _answer(example: Example) -> Iterator[str]:
    answer = example.answer
    if answer is None:
        return
    reason = f", {example.refused}" if example.refused else ""
    empty = "" if answer.media_type else ", without a body"
    yield from (f"Answer: {answer.status}{empty}{reason}", "")
    if answer.media_type is not None:
        yield from _block(answer.media_type, answer.body)
    if example.events is not None:
        yield from ("As a stream:", "")
        yield from _block("text/event-stream", example.events)


def _block(media_type: str, body: Any) -> Iterator[str]:
    if media_type == JSON:
        yield from ("```json", compact_json(shortened(body)), "```", "")
        return
    yield from ("```text", *(shortened(line) for line in body.rstrip().splitlines()), "```", "")


def _sentences(text: str) -> list[str]:
    return [text.replace("``", "`"), ""] if text else []


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None or default == "" else f"`{compact_json(default)}`"


def _row(*cells: str) -> str:
    escaped = (" ".join(cell.replace("``", "`").replace("|", "\\|").split()) for cell in cells)
    return f"| {' | '.join(escaped)} |"
