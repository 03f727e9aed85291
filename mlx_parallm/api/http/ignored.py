"""Reports to clients which fields of their requests were ignored.

``JsonRoute`` does so for every JSON body. Routes that read their bodies themselves call
``tell_ignored``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel
from starlette.responses import Response

from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.types.json_values import is_list, is_object

logger = logging.getLogger(__name__)

HEADER = "x-ignored-fields"
MAX_NAMES = 20
MAX_NAME_CHARS = 64


def tell_ignored(response: Response, names: Collection[str]) -> None:
    """Name the fields in a header and in the log; names that no header can hold are left out."""
    if not names:
        return
    listed = ", ".join([name for name in sorted(names) if _is_plain(name)][:MAX_NAMES])
    if listed:
        response.headers[HEADER] = listed
        logger.warning("ignored unknown request fields: %s", listed)


def ignored_names(form: type[BaseModel], body: Any) -> set[str]:
    """Return the names in a JSON body that its form does not read; those of options have a dot.

    A null means absent. The fields in a form's ``without_effect`` are not reported.
    """
    if not is_object(body):
        return set()
    read = _read_names(form)
    names = {name for name, value in body.items() if name not in read and value is not None}
    for name, options in _option_forms(form):
        values = body.get(name)
        if values is None:
            continue
        for value in values if is_list(values) else [values]:
            names |= {f"{name}.{inner}" for inner in ignored_names(options, value)}
    return names


def forms_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every model in a type, such as those of a union or of a list's elements."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from forms_of(part)


@functools.cache
def _read_names(form: type[BaseModel]) -> frozenset[str]:
    """Return the names that are not reported: a form reads them, or they have no effect."""
    names = set(form.model_fields)
    if issubclass(form, NullIsAbsent):
        names |= form.without_effect
    for field in form.model_fields.values():
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names.update(choice for choice in choices if isinstance(choice, str))
    return frozenset(names)


@functools.cache
def _option_forms(form: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Return the fields with options of a single form; other models pass their extra keys on."""
    options: list[tuple[str, type[BaseModel]]] = []
    for name, field in form.model_fields.items():
        forms = {each for each in forms_of(field.annotation) if issubclass(each, NullIsAbsent)}
        if len(forms) == 1:
            options.append((name, forms.pop()))
    return options


def _is_plain(name: str) -> bool:
    plain = name.replace(".", "").replace("_", "").replace("-", "")
    return len(name) <= MAX_NAME_CHARS and plain.isascii() and plain.isalnum()
