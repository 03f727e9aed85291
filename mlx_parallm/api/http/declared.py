"""The facts that a route declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from starlette.types import Scope

from mlx_parallm.api.http.dialect import OPENAI, Dialect
from mlx_parallm.server_config import ServerConfig

# FACTS: entry of the ASGI scope with the ``RouteFacts``.
FACTS = "mlx_parallm.route"
V1 = "/v1"
# FORM_BYTES: room in a form beside its file.
FORM_BYTES = 64 * 1024
SMALL_BODY_BYTES = 64 * 1024


class Access(Enum):
    """The callers who may use a route, if keys are set."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


class Kept(Enum):
    """Form in which a body is kept while its request runs.

    Attributes:
        REQUEST: it is kept, and counts among the client's requests.
        UPLOAD: it is kept until it is loaded, and counts apart from requests, so that a trainer's
            uploads do not wait for its rollouts.
        STREAMED: it is read as it comes, and none of it is kept in memory.
    """

    REQUEST = "request"
    UPLOAD = "upload"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The limit on a body's size.

    Attributes:
        size: returns the most bytes, by the settings.
        kept: how the body is kept.
        hint: appended to the message of a refusal.
        size_with_media: the same as ``size`` where a served model takes images or audio; None if
            that makes no difference.
        unpaced_types: content types of which a body takes the event loop no time, however long.
    """

    size: Callable[[ServerConfig], int]
    kept: Kept = Kept.REQUEST
    hint: str = ""
    size_with_media: Callable[[ServerConfig], int] | None = None
    unpaced_types: frozenset[str] = frozenset()


SMALL = BodyLimit(lambda _: SMALL_BODY_BYTES)
INPUT = BodyLimit(
    lambda config: config.max_body_bytes,
    size_with_media=lambda config: max(config.max_body_bytes, config.max_media_body_bytes),
)
#: Recordings as files of forms, which are searched for their end alone.
AUDIO = replace(INPUT, unpaced_types=frozenset({"multipart/form-data"}))
#: Tensors of nets: those of a safetensors file are its bytes.
TENSORS = replace(INPUT, unpaced_types=frozenset({"application/x-safetensors"}))
TOKENIZE_HINT = " See --max-body-bytes."
TOKENIZE = BodyLimit(lambda config: config.max_tokenize_bytes, hint=TOKENIZE_HINT)
#: Conversations of which tokens are counted; their texts have the limit of ``TOKENIZE``.
COUNT = BodyLimit(
    lambda config: config.max_tokenize_bytes,
    hint=TOKENIZE_HINT,
    size_with_media=lambda config: max(config.max_tokenize_bytes, config.max_media_body_bytes),
)
ADAPTER = BodyLimit(lambda config: config.max_adapter_bytes + FORM_BYTES, Kept.UPLOAD)
WEIGHTS = BodyLimit(lambda config: config.max_weights_bytes + FORM_BYTES, Kept.UPLOAD)
FILE = BodyLimit(lambda config: config.max_file_bytes + FORM_BYTES, Kept.STREAMED)
#: MAX_PART_BYTES: the largest part of a file, as at OpenAI, whose SDK sends parts of this size.
MAX_PART_BYTES = 64 * 1024 * 1024
PART = BodyLimit(
    lambda config: min(config.max_file_bytes, MAX_PART_BYTES) + FORM_BYTES, Kept.STREAMED
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """The facts of a route.

    Attributes:
        dialect: the form of its errors.
        body_limit: how large its bodies may be.
        access: who may use it.
        batchable: True if batches may contain its requests.
        in_any_process: True if every HTTP process answers it, because it only sends requests to the
            engine; False if the server's first process does.
        is_polled: True if supervisors poll it or a page asks for it by itself, so that it is logged
            at debug level only.
    """

    dialect: Dialect = OPENAI
    body_limit: BodyLimit = SMALL
    access: Access = Access.KEY
    batchable: bool = False
    in_any_process: bool = False
    is_polled: bool = False


UNDECLARED = RouteFacts()


def local_path(scope: Scope) -> str:
    """Return the path without the prefix that a proxy in front strips (``--root-path``)."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def facts_of(scope: Scope) -> RouteFacts:
    """Return the facts of a request's route; the defaults if the route is not known yet."""
    return scope.get(FACTS, UNDECLARED)


def id_headers(scope: Scope) -> dict[str, str]:
    """Return the headers with a request's id, if it has one yet."""
    request_id = scope.get("state", {}).get("request_id")
    if request_id is None:
        return {}
    second = facts_of(scope).dialect.id_header
    return {"x-request-id": request_id} | ({second: request_id} if second else {})
