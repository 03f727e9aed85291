"""``POST /v1/moderations``: a classifier's labels as OpenAI's categories of what is harmful."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import Response
from pydantic import BeforeValidator, Field, StrictStr, WithJsonSchema

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dialect import ErrorResponse
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.inputs.encode import single_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, TEXT, as_texts, is_list_of, many
from mlx_parallm.api.pooling.vectors.arrays import activated
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError, NotImplementedRouteError
from mlx_parallm.types.pooling import PoolingInfo

#: THRESHOLD: the least probability of a flagged category.
THRESHOLD = 0.5
CATEGORIES: tuple[str, ...] = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
# SHORT: the short names in the data set of https://arxiv.org/abs/2208.03274.
SHORT: Mapping[str, str] = {
    "S": "sexual",
    "H": "hate",
    "V": "violence",
    "HR": "harassment",
    "SH": "self-harm",
    "S3": "sexual/minors",
    "H2": "hate/threatening",
    "V2": "violence/graphic",
}
# HARMLESS: labels without the signs between words.
HARMLESS = frozenset(
    {"acceptable", "appropriate", "benign", "clean", "good", "harmless", "legit", "neutral"}
    | {"neither", "none", "normal", "ok", "okay", "other", "safe", "sfw"}
)
# HARMS: parts of labels by which a moderation model is recognised when the request names none.
HARMS = (
    *("abus", "harass", "hate", "illicit", "injection", "insult", "jailbreak", "nsfw"),
    *("obscen", "offens", "selfharm", "sexual", "threat", "toxic", "unsafe", "violen"),
)
NEGATIONS = ("not", "non", "no")
# UNNAMED: the form of transformers' labels without names.
UNNAMED = re.compile(r"LABEL_\d+")
routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
_SCHEMA = {"anyOf": [TEXT, many(TEXT), many(_PART)]}


def moderator(client: PoolingClient, name: str | None) -> PoolingModel:
    """Return the classifier of this name, or the first with labels of harm.

    Raises:
        NotImplementedRouteError: no model has labels of harm.
        ModelNotFoundError: none has the name.
        InvalidRequestError: its labels have another meaning.
    """
    if name is None:
        infos = ((model, model.info) for model in client.models())
        able = (model for model, info in infos if moderates(info) and _names_harms(info))
        first = next(able, None)
        if first is None:
            raise NotImplementedRouteError(
                "POST /v1/moderations needs a classifier of harmful content, and no loaded model "
                "is one."
            )
        return first
    model = client.get(name, "classify")
    if not moderates(model.info):
        raise InvalidRequestError(
            f"{name} cannot judge harm: its labels have no names, or they exclude each other and "
            "none of them means harmless.",
            param="model",
        )
    return model


def moderates(info: PoolingInfo) -> bool:
    """True if a model's labels are categories of harm.

    If labels exclude each other, every text has a likeliest one, so one must mean harmless.
    """
    if "classify" not in info.tasks or info.problem_type == "regression":
        return False
    if any(UNNAMED.fullmatch(label) for label in info.labels):
        return False
    is_multi = info.problem_type == "multi_label_classification" or len(info.labels) == 1
    return len(harmful(info.labels)) < len(info.labels) or is_multi


def _names_harms(info: PoolingInfo) -> bool:
    names = map(_bare, harmful(info.labels).values())
    return any(harm in name for name in names for harm in HARMS)


def harmful(labels: Sequence[str]) -> dict[int, str]:
    """Return the categories of all labels but the harmless ones, by their indices."""
    own = {_bare(category): category for category in CATEGORIES}
    short = SHORT if set(SHORT) < set(labels) else dict[str, str]()
    bare = {_bare(label) for label in labels}
    return {
        number: short.get(label) or own.get(_bare(label)) or label
        for number, label in enumerate(labels)
        if not _is_harmless(label, bare)
    }


def moderated(encoded: Encoded) -> dict[str, Any]:
    """Return OpenAI's verdict on each text."""
    info = encoded.call.model.info
    categories = harmful(info.labels)
    probabilities = activated(np.stack(encoded.results), info.problem_type)
    return {
        "id": encoded.call.answer_id,
        "model": encoded.call.name,
        "results": [_verdict(row, categories) for row in probabilities],
    }


def _verdict(probabilities: np.ndarray, categories: Mapping[int, str]) -> dict[str, Any]:
    """Return OpenAI's verdict; categories that the model does not know have the score 0."""
    scores = dict.fromkeys(CATEGORIES, 0.0)
    for number, name in categories.items():
        scores[name] = max(scores.get(name, 0.0), float(probabilities[number]))
    flags = {name: score >= THRESHOLD for name, score in scores.items()}
    known = set(categories.values())
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": scores,
        "category_applied_input_types": {
            name: ["text"] if name in known else [] for name in scores
        },
    }


def _is_harmless(label: str, labels: set[str]) -> bool:
    bare, words = _bare(label), re.findall(r"[a-z0-9]+", label.lower())
    if bare in HARMLESS or (len(words) > 1 and words[0] in NEGATIONS):
        return True
    # Such as "nothate" beside "hate".
    return any(bare.startswith(no) and bare[len(no) :] in labels for no in NEGATIONS)


def _bare(label: str) -> str:
    return re.sub(r"[^a-z0-9]", "", label.lower())


def _texts(value: Any) -> list[str]:
    """Return every text that gets its own verdict; parts get one together."""
    if is_list_of(value, dict) and len(value) <= MAX_INPUTS:
        value = "\n".join(_part(part) for part in value)
    texts = as_texts(value)
    if texts is not None and all(texts):
        return texts
    raise ValueError(
        f"must be a text, or a list of 1 to {MAX_INPUTS} texts or of parts of type text; none empty"
    )


class ModerationRequest(OpenForm):
    """OpenAI's body."""

    input: Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_SCHEMA)] = Field(
        description="A text, several, or the parts of one."
    )
    model: StrictStr | None = Field(
        None, description="A classifier; default: the first with labels of harm."
    )


@routes.post(
    "/v1/moderations",
    batchable=True,
    responses={501: {"model": ErrorResponse, "description": "No such classifier is loaded."}},
)
async def create_moderation(body: ModerationRequest, pooling: PoolingDep) -> Response:
    """Say of each text whether it is harmful, and how."""
    call = pooling.call(moderator(pooling.client, body.model), body.model, "modr")
    return await call.respond(await single_inputs(body.input, call.model, "classify"), moderated)


def _part(part: Any) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise ValueError('parts must be of the form {"type": "text", "text": …}')
    return text
