"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shape; the former also in TEI's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

from fastapi import APIRouter

from mlx_parallm.api.convert.chat_tools import chat_tools
from mlx_parallm.api.convert.input_prompts import named_prompt
from mlx_parallm.api.convert.tei import text_tokens
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.model_choice import generator_or_encoder
from mlx_parallm.api.schemas.chat import check_template_kwargs, turns_of
from mlx_parallm.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.encode import Task
from mlx_parallm.engine.encoder_interface import EncoderModel
from mlx_parallm.engine.interface import EngineClient, ServedModel
from mlx_parallm.errors import InvalidRequestError

router = APIRouter(route_class=JsonRoute)

# Of one body's inputs: what is told of a token takes some hundred times as much as its text.
MAX_CHARACTERS = 2**21


@router.post("/tokenize")
async def tokenize(
    body: TokenizeRequest, engine: EngineDep
) -> dict[str, Any] | list[list[dict[str, Any]]]:
    """A text's or a conversation's tokens; of ``inputs`` a list for each text, as TEI has it."""
    if body.inputs is not None:
        return await _text_tokens(body, engine, body.inputs)
    model = generator_or_encoder(engine, body.model, *get_args(Task))
    ids, strings = await asyncio.to_thread(_encode, body, model)
    return {
        "count": len(ids),
        "max_model_len": model.info.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, engine: EngineDep) -> dict[str, Any]:
    """The text of tokens, special ones included."""
    tokenizer = generator_or_encoder(engine, body.model, *get_args(Task)).tokenizer
    if any(not 0 <= token_id < tokenizer.vocab_size for token_id in body.tokens):
        raise InvalidRequestError("tokens has an id outside the vocabulary.", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


async def _text_tokens(
    body: TokenizeRequest, engine: EngineClient, texts: Sequence[str]
) -> list[list[dict[str, Any]]]:
    if body.prompt is not None or body.messages is not None:
        raise InvalidRequestError("Give inputs, or prompt or messages.", param="inputs")
    model = engine.encoders.get(body.model, *get_args(Task))
    prompt = named_prompt(model.info, body.prompt_name)
    given = [prompt + text for text in texts]
    if (size := sum(map(len, given))) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"inputs have {size} characters; {MAX_CHARACTERS} are the most.", param="inputs"
        )

    def work() -> list[list[dict[str, Any]]]:
        found = model.tokenizer.spans(given, add_special_tokens=body.add_special_tokens)
        return [text_tokens(text, spans) for text, spans in zip(given, found, strict=True)]

    return await asyncio.to_thread(work)


def _encode(
    body: TokenizeRequest, model: ServedModel | EncoderModel
) -> tuple[list[int], list[str] | None]:
    ids = list(_ids(body, model))
    if isinstance(model, EncoderModel):
        string = model.tokenizer.token_string
    else:
        string = model.tokenizer.vocabulary_string
    return ids, [string(i) for i in ids] if body.return_token_strs else None


def _ids(body: TokenizeRequest, model: ServedModel | EncoderModel) -> Sequence[int]:
    if body.messages is None and body.prompt is None:
        raise InvalidRequestError("prompt or messages is needed.", param="prompt")
    check_template_kwargs(body.chat_template_kwargs)
    if isinstance(model, EncoderModel):
        return _encoder_ids(body, model)
    tokenizer = model.tokenizer
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return tokenizer.encode_chat(
        template_messages(turns_of(body.messages), id_length=model.call_id_length),
        tools=[tool.for_template() for tool in chat_tools(body.tools or ())] or None,
        template_kwargs={**model.chat_template_kwargs, **body.chat_template_kwargs},
        **_ends(body),
    )


def _encoder_ids(body: TokenizeRequest, model: EncoderModel) -> Sequence[int]:
    if body.tools:
        raise InvalidRequestError(f"{model.names[0]} reads no tools.", param="tools")
    tokenizer = model.tokenizer
    if body.messages is None:
        texts = [body.prompt or ""]
        return tokenizer.encode(texts, add_special_tokens=body.add_special_tokens)[0]
    return tokenizer.encode_chat(
        template_messages(turns_of(body.messages)),
        template_kwargs=body.chat_template_kwargs,
        **_ends(body),
    )


def _ends(body: TokenizeRequest) -> dict[str, bool]:
    """How a conversation ends, for a template."""
    return {
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
    }
