"""What routes take from the application's state, and checks of the raw body."""

from __future__ import annotations

import contextlib
import json
from itertools import accumulate
from typing import Annotated

from fastapi import Depends, Request

from mlx_parallm.api.auth import client_of
from mlx_parallm.api.internal import STREAMED_PATH, internal_caller
from mlx_parallm.batch_jobs.service import BatchService
from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.interface import EngineClient
from mlx_parallm.errors import InvalidRequestError

MAX_DEPTH = 128
TOO_DEEP = "The body is nested too deeply."

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))


async def get_engine(request: Request) -> EngineClient:
    """The engine behind this application, as the caller may use it."""
    caller = internal_caller(request)
    return caller.engine if caller is not None else request.app.state.engine


async def get_config(request: Request) -> ServerConfig:
    """The settings of this application."""
    return request.app.state.config


async def get_max_waiting(request: Request) -> int | None:
    """How many sequences the engine's queue holds for this caller, if that is known."""
    caller = internal_caller(request)
    return caller.max_waiting if caller is not None else request.app.state.max_waiting


async def get_client(request: Request) -> str:
    """Whose request it is: a digest of its key, or the owner of what is done in the background."""
    caller = internal_caller(request)
    if caller is not None:
        return caller.client
    return client_of(request.headers, request.app.state.config)


async def get_batches(request: Request) -> BatchService:
    """The files and batches of this application."""
    return request.app.state.batches


async def refuse_lone_surrogates(request: Request) -> None:
    r"""Refuse a body whose text is no Unicode: JSON can write ``"\ud800"``, UTF-8 cannot.

    Tokenizers and answers fail on such text, so it is stopped before anything reads it.

    Raises:
        InvalidRequestError: a string has a surrogate without its other half, or nesting is too
            deep to tell.
    """
    raw = await request.body()
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return
    # A body that is no JSON gets its own answer where it is validated.
    with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
        try:
            json.dumps(json.loads(raw), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidRequestError("The body has half a surrogate pair in a text.") from None
        except RecursionError:
            raise InvalidRequestError(TOO_DEEP) from None


async def refuse_deep_bodies(request: Request) -> None:
    """Refuse a JSON body that is nested deeper than anything sensible, before it is validated.

    What walks such a body later (validation, templates, grammars) may recurse.

    Raises:
        InvalidRequestError: it is nested more than ``MAX_DEPTH`` deep.
    """
    is_json = "json" in request.headers.get("content-type", "").lower()
    if not is_json or request.scope["path"].endswith(STREAMED_PATH):
        return
    if is_deeper(await request.body(), MAX_DEPTH):
        raise InvalidRequestError(TOO_DEEP)


def is_deeper(raw: bytes, limit: int) -> bool:
    """Whether JSON text has arrays and objects inside each other more than ``limit`` deep."""
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    # Up to where it stops being JSON, a quote that no backslash escapes begins or ends a text.
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(unescaped.split(b'"')[::2]).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > limit


EngineDep = Annotated[EngineClient, Depends(get_engine)]
ConfigDep = Annotated[ServerConfig, Depends(get_config)]
ClientDep = Annotated[str, Depends(get_client)]
BatchesDep = Annotated[BatchService, Depends(get_batches)]
MaxWaitingDep = Annotated[int | None, Depends(get_max_waiting)]
