"""What routes take from the application's state, and checks of the raw body."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

from fastapi import Depends, Request

from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.interface import EngineClient
from mlx_parallm.errors import InvalidRequestError


async def get_engine(request: Request) -> EngineClient:
    """The engine behind this application."""
    return request.app.state.engine


async def get_config(request: Request) -> ServerConfig:
    """The settings of this application."""
    return request.app.state.config


async def get_max_waiting(request: Request) -> int | None:
    """How many sequences the engine's queue holds, if that is known."""
    return request.app.state.max_waiting


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
            raise InvalidRequestError("The body is nested too deeply.") from None


EngineDep = Annotated[EngineClient, Depends(get_engine)]
ConfigDep = Annotated[ServerConfig, Depends(get_config)]
MaxWaitingDep = Annotated[int | None, Depends(get_max_waiting)]
