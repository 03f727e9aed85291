"""Bodies of speech requests: a form with a file, or JSON with a ``data:`` URL, as in batches."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_parallm.api.audio.schema import FILE, FILE_URL, TIMED, VERBOSE_JSON, SpeechRequest
from mlx_parallm.api.http.body_budget import held_body
from mlx_parallm.api.http.json_body import ignored_names
from mlx_parallm.api.http.multipart import FormReader
from mlx_parallm.api.http.offload import in_thread, maybe_in_thread
from mlx_parallm.api.http.uploads import is_json, validated
from mlx_parallm.api.turns.prelude import Prelude, generator
from mlx_parallm.audio.transcriber import TEMPERATURES, Task
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.tokenizer.speech.rules import SpeechRules
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

# MAX_FIELD_BYTES: of a prompt, for the most part, of which the model reads some hundred tokens.
MAX_FIELD_BYTES = 64 * 1024
DATA, BASE64 = "data:", ";base64"
# MAX_HEADER_CHARS: of a URL before its comma.
MAX_HEADER_CHARS = 256


@dataclass(frozen=True, slots=True)
class SpeechBody:
    """A body that has been read.

    Attributes:
        request: its fields.
        data: the bytes of the recording's file.
        file_field: the field that has the file.
        ignored: names of fields that are not read.
    """

    request: SpeechRequest
    data: bytes
    file_field: str
    ignored: frozenset[str]


async def read_body(prelude: Prelude) -> SpeechBody:
    """Return the fields and the file of a request.

    Raises:
        InvalidRequestError: the body is no form and no JSON, has no file or several, or a field is
            wrong.
        OverloadedError: the client's bodies take too much memory.
    """
    kind = prelude.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if is_json(kind):
        value = await prelude.request.json()
        if not is_object(value):
            raise InvalidRequestError("The body must be a JSON object.")
        # The request keeps its own: it may be handled once more.
        fields, field = dict(value), FILE_URL
        data = await in_thread(partial(_from_url, fields.pop(FILE_URL, None)))
    else:
        (fields, data), field = await _read_form(prelude), FILE
    # The request keeps its body beside the file.
    held_body(prelude.request.scope).expand(len(data))
    request = validated(SpeechRequest, fields)
    request.check()
    return SpeechBody(request, data, field, frozenset(ignored_names(SpeechRequest, fields)))


async def _read_form(prelude: Prelude) -> tuple[dict[str, Any], bytes]:
    """Return the fields and the file of a form."""
    content_type = prelude.request.headers.get("content-type", "")
    form = FormReader(content_type, FILE, max_field_bytes=MAX_FIELD_BYTES)
    body = await prelude.request.body()

    def read() -> bytes:
        data = form.feed(body)
        form.finish()
        return data

    data = await prelude.on_body(read)
    return _object_of(form), data


def _object_of(form: FormReader) -> dict[str, Any]:
    """Return a form's fields as an object; an empty text is no value, and no entry of a list."""
    fields: dict[str, Any] = {
        name: [text for text in texts if text] for name, texts in form.lists.items()
    }
    for name, text in form.fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket:
            # An object has a part for each of its fields.
            fields[outer] = {inner.removesuffix("]"): text}
        elif text:
            is_list = name in ("timestamp_granularities", "include")
            fields[name] = [text] if is_list else text
    return fields


def _from_url(url: object) -> bytes:
    """Return the bytes of a ``data:`` URL (RFC 2397); raise InvalidRequestError if it is none."""
    problem = f"{FILE_URL} must be a URL of the form data:audio/<format>;base64,<data>."
    if not isinstance(url, str):
        raise InvalidRequestError(problem, param=FILE_URL)
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    header = url[: max(comma, 0)].lower()
    if not header.startswith(DATA) or not header.endswith(BASE64):
        raise InvalidRequestError(problem, param=FILE_URL)
    try:
        return base64.b64decode(url[comma + 1 :], validate=True)
    except ValueError:
        raise InvalidRequestError(f"{FILE_URL} is not valid base64.", param=FILE_URL) from None


def speech_model(
    engine: RequestClient, name: str | None
) -> tuple[str, GenerationModel, SpeechRules]:
    """Return the name for the log, the model or adapter that hears, and its tokens.

    Raises:
        ModelNotFoundError: nothing has this name.
        InvalidRequestError: the model hears nothing, or none does.
    """
    if name is None:
        models = GENERATION.client(engine).models()
        model = next((each for each in models if each.speech is not None), None)
        if model is None:
            raise InvalidRequestError("No speech model is served here.", param="model")
        name = model.names[0]
    else:
        name, model = generator(engine, name, takes_sources=True)
    if model.speech is None:
        raise InvalidRequestError(
            f"{name} is no speech model, and takes no audio.",
            param="model",
            code="unsupported_model",
        )
    return name, model, model.speech.within(model.max_model_len)


async def task_of(body: SpeechRequest, name: str, model: GenerationModel) -> Task:
    """Return the task of a request to a speech model, ``name`` being one of ``rules.TASKS``.

    Raises:
        InvalidRequestError: the model has no such task, or does not know the language; or the
            prompt has special tokens.
    """
    rules = model.speech
    assert rules is not None, "it is a speech model"
    rules.check_task(name)
    return Task(
        name=name,
        language=None if body.language is None else rules.language(body.language),
        has_timestamps=body.response_format in TIMED,
        previous=await _prompt_ids(body.prompt or "", model, rules),
        temperatures=(body.temperature,) if body.temperature else TEMPERATURES,
        seed=body.seed,
        wants_no_speech=body.response_format == VERBOSE_JSON,
    )


async def _prompt_ids(text: str, model: GenerationModel, rules: SpeechRules) -> tuple[int, ...]:
    """Return the tokens of a prompt; it begins with a space, as words do."""
    if not text.strip():
        return ()
    words = f" {text.strip()}"
    ids = await maybe_in_thread(lambda: model.text_ids(words, add_special_tokens=False), len(words))
    if any(token_id >= rules.end_id for token_id in ids):
        raise InvalidRequestError("prompt must have no special tokens.", param="prompt")
    return tuple(ids)
