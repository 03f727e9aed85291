"""``POST /tokenize``, also in TEI's shape, ``/detokenize`` and ``/tokenizer_info``, as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import AliasChoices, Field, StrictBool, StrictStr
from starlette.responses import Response

from mlx_parallm.api.chat.request import chat_tools
from mlx_parallm.api.chat.schema import Messages, turns_of
from mlx_parallm.api.http.declared import COUNT, SMALL, TOKENIZE
from mlx_parallm.api.http.dependencies import RequestsDep
from mlx_parallm.api.http.forms import Ids
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import TOKENS
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.inputs.encode import named_prompt
from mlx_parallm.api.pooling.inputs.schema import PromptName, Texts
from mlx_parallm.api.pooling.tei.answer import text_tokens
from mlx_parallm.api.tokenize.sides import LanguageFields, SideField
from mlx_parallm.api.turns.fields import ProcessorKwargs, TemplateKwargs, TurnEndFields
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.images import image_sources, pixel_range_of
from mlx_parallm.api.turns.prelude import PreludeDep, generator, tokenizing_model
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.images.prompt import image_prompt
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.serving.interface import RequestClient, TokenizingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object
from mlx_parallm.types.pooling import Task
from mlx_parallm.types.token_limit import ANY_LENGTH

routes = Routes(TOKENS, body_limit=TOKENIZE, in_any_process=True)
# MAX_CHARACTERS: characters of a body's inputs. The answer about a token has some hundred times as
# many bytes as its text.
MAX_CHARACTERS = 1_000_000
# PART_ENTRIES: entries of a list that are written at once.
PART_ENTRIES = 1024


class TokenizeRequest(TurnEndFields, LanguageFields):
    """A text (``prompt`` or llama.cpp's ``content``) or a conversation; or TEI's ``inputs``."""

    model: StrictStr | None = Field(
        None,
        description="Default: the first that generates, else, or of inputs, the first pooling "
        "model.",
    )
    prompt: StrictStr | None = Field(
        None, validation_alias=AliasChoices("prompt", "content"), description="A text."
    )
    messages: Messages | None = Field(None, description="A conversation.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools for the template.")
    add_special_tokens: StrictBool = Field(
        True, description="Add the model's special tokens to a text."
    )
    chat_template_kwargs: TemplateKwargs
    mm_processor_kwargs: ProcessorKwargs = None
    return_token_strs: StrictBool = Field(
        False, description='Add every token as the vocabulary has it, such as "Ġword".'
    )
    inputs: Texts | None = Field(
        None, description="TEI's: a text or several, with TEI's answer, by a pooling model."
    )
    prompt_name: PromptName = None


class DetokenizeRequest(SideField):
    """Token ids to be turned into text."""

    model: StrictStr | None = Field(
        None, description="Default: the first that generates, else the first pooling model."
    )
    tokens: Ids = Field(description="Token ids.")


@routes.post("/tokenize", body_limit=COUNT)
async def tokenize(body: TokenizeRequest, engine: RequestsDep, prelude: PreludeDep) -> Response:
    """Return the tokens of a text or a conversation; for TEI's ``inputs``, a list for each text."""
    if body.inputs is not None:
        await prelude.check_texts(())
        return await _text_tokens(body, engine, body.inputs)
    model = tokenizing_model(engine, body.model)
    turns = turns_of(body.messages or (), takes_images=True)
    sources = image_sources(turns)
    await prelude.check_texts(source.url for source in sources)
    if not sources:
        return await in_thread(lambda: _tokens_answer(body, model, _ids(body, model)))
    if not isinstance(model, GenerationModel):
        raise InvalidRequestError(f"{model.names[0]} takes no images.", param=sources[0].param)
    pixel_range = pixel_range_of(body.mm_processor_kwargs)
    prepared = await prelude.images.prepare(sources, model, pixel_range, is_counted=True)
    return await in_thread(
        lambda: _tokens_answer(body, model, _image_ids(body, turns, prepared, model))
    )


@routes.post("/detokenize")
async def detokenize(body: DetokenizeRequest, engine: RequestsDep) -> dict[str, Any]:
    """Return the text of tokens, special ones included."""
    model = tokenizing_model(engine, body.model)
    sides = body.sides(model)
    tokenizer = model.tokenizer if sides is None or body.is_target() else sides.source

    def work() -> str:
        if any(not 0 <= token_id < tokenizer.vocab_size for token_id in body.tokens):
            raise InvalidRequestError("tokens has an id outside the vocabulary.", param="tokens")
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return {"prompt": await in_thread(work)}


@routes.get("/tokenizer_info", body_limit=SMALL)
async def tokenizer_info(engine: RequestsDep, model: str | None = None) -> dict[str, Any]:
    """Return facts about the tokenizer of a model that generates, under vLLM's names."""
    _, chosen = generator(engine, model, takes_sources=True)
    tokenizer = chosen.tokenizer
    ends = sorted(tokenizer.eos_ids)
    begin = tokenizer.bos_id
    facts: dict[str, Any] = {
        "tokenizer_class": getattr(tokenizer, "class_name", type(tokenizer).__name__),
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": chosen.max_model_len,
        "bos_token": None if begin is None else chosen.vocabulary_string(begin),
        "eos_token": chosen.vocabulary_string(ends[0]) if ends else None,
        "eos_token_ids": ends,
    }
    template = tokenizer.chat_template
    return facts if template is None else facts | {"chat_template": template}


async def _text_tokens(
    body: TokenizeRequest, engine: RequestClient, texts: Sequence[str]
) -> Response:
    if body.prompt is not None or body.messages is not None:
        raise InvalidRequestError("Give inputs, or prompt or messages.", param="inputs")
    model = POOLING.client(engine).get(body.model, *get_args(Task))
    body.sides(model)
    prompt = named_prompt(model.info, body.prompt_name)
    prompted = [prompt + text for text in texts]
    if (size := sum(map(len, prompted))) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"inputs have {size} characters, and at most {MAX_CHARACTERS} are allowed.",
            param="inputs",
        )

    def work() -> Response:
        spans_of_texts = model.tokenizer.spans(prompted, add_special_tokens=body.add_special_tokens)
        return _json_response(
            [text_tokens(*each) for each in zip(prompted, spans_of_texts, strict=True)]
        )

    return await in_thread(work)


def _tokens_answer(
    body: TokenizeRequest, model: TokenizingModel, token_ids: Sequence[int]
) -> Response:
    ids = list(token_ids)
    most, string_of = model.max_model_len, model.vocabulary_string
    if isinstance(model, GenerationModel) and model.seq2seq is not None and not body.is_target():
        most, string_of = model.info.max_source_len, model.seq2seq.source.vocabulary_string
    strings = [string_of(i) for i in ids] if body.return_token_strs else None
    return _json_response(
        {
            "count": len(ids),
            "max_model_len": most,
            "tokens": ids,
            "token_strs": strings,
        }
    )


def _json_response(answer: Any) -> Response:
    return Response(_json(answer).encode(errors="replace"), media_type="application/json")


def _json(value: Any) -> str:
    """Return the value as JSON, long lists in parts, because writing holds the interpreter."""
    if is_object(value) and any(is_list(each) for each in value.values()):
        return f"{{{','.join(f'{_dumps(key)}:{_json(each)}' for key, each in value.items())}}}"
    if not is_list(value):
        return _dumps(value)
    if value and is_list(value[0]):
        return f"[{','.join(map(_json, value))}]"
    parts = (value[begin : begin + PART_ENTRIES] for begin in range(0, len(value), PART_ENTRIES))
    return f"[{','.join(_dumps(part)[1:-1] for part in parts)}]"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _image_ids(
    body: TokenizeRequest,
    turns: Sequence[dict[str, Any]],
    images: Sequence[PreparedImage],
    model: GenerationModel,
) -> Sequence[int]:
    """Return the tokens of a conversation with images."""
    form, tokenizer = model.images, model.tokenizer
    assert form is not None, "a model without images has refused them"
    return image_prompt(
        template_messages(turns, id_length=model.call_id_length),
        images,
        form,
        render=lambda messages, hide: tokenizer.render_chat(
            messages,
            tools=hide([tool.for_template() for tool in chat_tools(body.tools or ())] or None),
            template_kwargs=hide(model.template_variables(body.chat_template_kwargs)),
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        ),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False, limit=ANY_LENGTH),
    ).token_ids


def _ids(body: TokenizeRequest, model: TokenizingModel) -> Sequence[int]:
    if body.messages is None and body.prompt is None:
        raise InvalidRequestError("Give prompt or messages.", param="prompt")
    if body.tools and not model.reads_tools:
        raise InvalidRequestError(f"{model.names[0]} does not take tools.", param="tools")
    sides = body.sides(model)
    if body.messages is not None:
        body.check_conversation()
    elif sides is not None:
        return body.side_ids(sides, body.prompt or "", add_special_tokens=body.add_special_tokens)
    if body.messages is None:
        return model.text_ids(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return model.chat_ids(
        template_messages(turns_of(body.messages), id_length=model.call_id_length),
        tools=[tool.for_template() for tool in chat_tools(body.tools or ())] or None,
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
