"""Prompts of ``LLM`` for encoder-decoders."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.offline.completions import Ended, OutputReader, RequestOutput
from mlx_parallm.offline.generation import OfflineRequests, as_prompts, chat_prompt, plain_prompt
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.events import FinishReason, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.fake_seq2seq import (
    ENGLISH,
    GERMAN,
    START,
    decoder_model,
    seq2seq_model,
    source_ids,
)
from tests.fakes import EOS


def request_of(
    prompt: Any, params: SamplingParams | None = None, model: GenerationModel | None = None
) -> GenerateRequest:
    served = model or seq2seq_model()
    if isinstance(prompt, ImagePrompt):
        items: list[Any] = [prompt]
    else:
        items = [plain_prompt(each, lambda: served) for each in as_prompts(prompt)]
    ((_, request),) = OfflineRequests().make(items, lambda: served, params, None)
    return request


@pytest.mark.parametrize(
    ("prompt", "source", "decoder"),
    [
        ("hi", [ENGLISH, *b"hi", EOS], (START,)),
        ([5, 6], [5, 6], (START,)),
        ({"prompt": "hi"}, [ENGLISH, *b"hi", EOS], (START,)),
        ({"prompt_token_ids": [5]}, [5], (START,)),
        ({"encoder_prompt": "hi"}, [ENGLISH, *b"hi", EOS], (START,)),
        ({"encoder_prompt": {"prompt_token_ids": [7]}, "decoder_prompt": None}, [7], (START,)),
        (
            {"encoder_prompt": {"prompt": "a"}, "decoder_prompt": "b"},
            [ENGLISH, *b"a", EOS],
            (START, *b"b"),
        ),
        (
            {"encoder_prompt": [7], "decoder_prompt": {"prompt_token_ids": [START, 9]}},
            [7],
            (START, 9),
        ),
        (
            {"prompt": "a", "src_lang": "de", "tgt_lang": "en"},
            [GERMAN, *b"a", EOS],
            (START, ENGLISH),
        ),
    ],
)
def test_prompts_are_sources(prompt: Any, source: list[int], decoder: tuple[int, ...]) -> None:
    request = request_of(prompt)
    assert source_ids(request.inputs[0]) == source
    assert request.prompt_ids == decoder


def test_lengths_are_those_of_the_files_unless_parameters_name_them() -> None:
    params = request_of("hi").params
    assert (params.max_tokens, params.min_tokens, params.forced_eos_id) == (39, 2, EOS)
    params = request_of("hi", SamplingParams(max_tokens=7, min_tokens=1)).params
    assert (params.max_tokens, params.min_tokens) == (7, 1)
    params = request_of("hi", SamplingParams(temperature=0)).params
    assert (params.temperature, params.max_tokens) == (0, 39)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ({"encoder_prompt": ""}, "encoder_prompt"),
        ({"decoder_prompt": "a"}, "encoder_prompt"),
        ({"encoder_prompt": {"prompt": "a", "prompt_token_ids": [1]}}, "encoder_prompt"),
        ({"encoder_prompt": 7}, "encoder_prompt"),
        ({"encoder_prompt": "a", "decoder_prompt": 7}, "decoder_prompt"),
        ({"encoder_prompt": "x" * 99}, "encoder_prompt"),
        ({"prompt": "a", "multi_modal_data": {"image": b""}}, "multi_modal_data"),
        ({"prompt": "a", "src_lang": "en"}, "tgt_lang"),
        ({"encoder_prompt": [999]}, "encoder_prompt"),
    ],
)
def test_bad_prompts(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        request_of(prompt)
    assert refusal.value.param == param


def test_other_models_have_no_sides() -> None:
    with pytest.raises(InvalidRequestError, match="A prompt has no 'decoder_prompt'"):
        request_of({"prompt": "a", "decoder_prompt": "b"}, model=decoder_model())


def test_a_conversation_is_a_source_where_there_is_a_template() -> None:
    talk = [{"role": "user", "content": "hi"}]
    request = request_of(chat_prompt(talk, seq2seq_model(templated=True), {}, None))
    assert bytes(source_ids(request.inputs[0])) == b"user: hi\n"
    with pytest.raises(InvalidRequestError, match="use /v1/completions"):
        chat_prompt(talk, seq2seq_model(), {}, None)


def test_an_output_has_the_tokens_of_both_sides() -> None:
    ended: SimpleQueue[Ended] = SimpleQueue()
    request = request_of("hi")
    reader = OutputReader("hi", request, ended)
    reader.put(
        TokenEvent(
            request_id=request.request_id,
            index=0,
            token_ids=(EOS,),
            text="",
            finish_reason=FinishReason.STOP,
        )
    )
    output = ended.get()
    assert isinstance(output, RequestOutput)
    assert output.prompt_token_ids == (START,)
    assert output.encoder_prompt_token_ids == (ENGLISH, *b"hi", EOS)
