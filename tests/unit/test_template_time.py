"""Texts that are compared have one time, though a second or a day may end between them."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.decisions import routes as decisions
from mlx_parallm.api.decisions.schema import DecisionRequest
from mlx_parallm.api.mezo.conversations import conversation_input
from mlx_parallm.api.mezo.pairs import pair_reader
from mlx_parallm.api.mezo.rows import PairRow
from mlx_parallm.api.mezo.schema import Pairs
from mlx_parallm.api.pooling.inputs.encode import AS_IT_IS
from mlx_parallm.api.pooling.scores.rewards import reward_inputs
from mlx_parallm.api.rl.request import encode_items
from mlx_parallm.api.rl.schema import RolloutItem, RolloutRequest
from mlx_parallm.api.turns.images import Images
from mlx_parallm.api.turns.prepare import render_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.truncation import prepare_fitting
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.prompt import Hide, Messages, image_prompt
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.template_time import at_one_time, template_now
from mlx_parallm.tokenizer.decoder_tokenizer import DecoderTokenizer
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.tokenizer.jinja_chat import ChatTemplate, JinjaChat
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.training import ChoiceInput
from tests.corpus.template_folder import with_template
from tests.fake_encoders import make_encoder
from tests.fakes import make_info
from tests.ticking_clock import let_time_pass
from tests.unit.api.mezo.test_conversations import Tokens
from tests.unit.images.test_prompt import FORM, Bars, encode, render, text_part
from tests.unit.tokenizer.test_chat import save

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CLOCK = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
TIMED = CLOCK + TURNS
MESSAGES = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "say"},
    {"role": "user", "content": "more"},
]
NO = [{"role": "assistant", "content": "no"}]


@pytest.fixture(autouse=True)
def time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    let_time_pass(monkeypatch)


@pytest.fixture(name="timed")
def timed_tokenizer() -> ParallmTokenizer:
    return with_template(TIMED)


def test_each_text_has_the_present_time(timed: ParallmTokenizer) -> None:
    first, second = (timed.render_chat(MESSAGES) for _ in range(2))
    assert first != second


def test_a_caller_holds_the_time(timed: ParallmTokenizer) -> None:
    with at_one_time():
        texts = {timed.render_chat(MESSAGES)}
        with at_one_time():
            texts.add(timed.render_chat(MESSAGES))
        texts.add(timed.render_chat(MESSAGES))
    assert len(texts) == 1
    assert timed.render_chat(MESSAGES) not in texts


def test_the_time_is_whole(timed: ParallmTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    let_time_pass(monkeypatch, repeat(datetime.datetime(2020, 2, 29, 23, 59, 59)))
    assert timed.render_chat(MESSAGES).startswith("2020-02-29 23:59:59")


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "CodeLlamaTokenizer"])
def test_classes_with_code_of_their_own_hold_it_too(name: str, tmp_path: Path) -> None:
    config = save(tmp_path, TIMED) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.description.endswith("(Python code)") == (name == "CodeLlamaTokenizer")
    assert tokenizer.probe_template() == with_template(TURNS).probe_template()
    with at_one_time():
        assert tokenizer.render_chat(MESSAGES) == tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize("template", [TURNS, "{# thinking thinking_effort #}" + TURNS])
def test_probes_find_what_they_find_without_a_time(template: str) -> None:
    timed, plain = (with_template(each) for each in (CLOCK + template, template))
    assert timed.takes_tools == plain.takes_tools
    off = {"enable_thinking": False, "reasoning_effort": "low"}
    assert timed.template_variables(off) == plain.template_variables(off)


def pooling_template(template: str) -> ChatTemplate:
    chat = JinjaChat(template, {})
    return ChatTemplate(chat, chat)


@pytest.fixture(name="model")
def timed_model(timed: ParallmTokenizer) -> GenerationModel:
    info = make_info(vocab_size=timed.vocab_size)
    return GenerationModel(names=("m",), root="m", created=0, tokenizer=timed, info=info)


async def test_the_latest_turn_of_a_chat_is_found(model: GenerationModel) -> None:
    turn = TurnRequest(request_id="r", messages=MESSAGES)
    prompt = await render_turn(turn, model, marks=model.tokenizer)
    assert prompt.turn_start == prompt.text.index("more")
    assert prompt.answer_start == len(prompt.text)


def test_a_conversation_is_learnt(model: GenerationModel) -> None:
    messages = [ChatMessage.model_validate(each) for each in MESSAGES[:2]]
    item = conversation_input(messages, None, model)
    weighted = zip(item.choices[0], item.weights[0], strict=True)
    learnt = [token for token, weight in weighted if weight]
    assert model.tokenizer.decode(learnt) == "say"


def test_both_texts_of_a_pair_have_one_prompt(model: GenerationModel) -> None:
    read = pair_reader(Pairs.model_validate({"ends": False}), model)
    row = {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:2], "rejected": NO}
    item = read(PairRow.model_validate(row)).input
    assert isinstance(item, ChoiceInput)
    assert [model.tokenizer.decode(choice) for choice in item.choices] == ["say", "no"]


def test_equal_texts_of_a_pair_for_rewards_are_found(timed: ParallmTokenizer) -> None:
    backend = cast("Any", timed)._hub.backend_tokenizer
    template = pooling_template(TIMED.replace("m.content", "m.content | trim"))
    tokenizer = EncoderTokenizer(backend, None, template)
    info = SimpleNamespace(max_model_len=1000, vocab_size=1000)
    model = SimpleNamespace(tokenizer=tokenizer, info=info)
    read = pair_reader(Pairs.model_validate({}), cast("Any", model))
    spaced = [{"role": "assistant", "content": "say "}]
    row = {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:2], "rejected": spaced}
    with pytest.raises(InvalidRequestError, match="two equal texts"):
        read(PairRow.model_validate(row))


def test_equal_pairs_of_a_reranker_are_equal() -> None:
    timed = with_template("{# query document #}" + TIMED)
    backend = cast("Any", timed)._hub.backend_tokenizer
    reranker = DecoderTokenizer(timed, backend, scores_pairs=True)
    first, second = reranker.encode_pairs(2 * [("a query", "a document")])
    assert first == second
    assert "a document" in reranker.decode(first[0])


async def test_equal_conversations_get_equal_rewards(timed: ParallmTokenizer) -> None:
    backend = cast("Any", timed)._hub.backend_tokenizer
    tokenizer = EncoderTokenizer(backend, None, pooling_template(TIMED))
    model = make_encoder("m")
    info = replace(model.info, vocab_size=1000, max_model_len=1000)
    model = replace(model, info=info, tokenizer=tokenizer)
    inputs = await reward_inputs(2 * [MESSAGES], model, "classify", AS_IT_IS, template_kwargs={})
    assert inputs[0] == inputs[1]


async def test_equal_prompts_of_a_rollout_are_equal(model: GenerationModel) -> None:
    items = 2 * [RolloutItem.model_validate({"messages": MESSAGES})]
    body = RolloutRequest.model_validate({"model": "m", "prompts": items})
    first, second = await encode_items(items, body, model, Images(MediaLimits()))
    assert first == second


def test_the_latest_turn_behind_images_is_found() -> None:
    def timed_render(messages: Messages, hide: Hide) -> str:
        return f"{template_now()}|" + render(messages, hide)

    messages = [{"role": "user", "content": [text_part(each)]} for each in "ab"]
    prompt = image_prompt(messages, [], FORM, render=timed_render, encode=encode, marks=Bars())
    assert prompt.turn_start == prompt.text.index("b")


def test_questions_about_an_input_share_it(model: GenerationModel) -> None:
    questions = [{"type": "predicate", "instructions": f"Is it {each}?"} for each in "abc"]
    fields = {"model": "m", "input": "A text.", "questions": questions}
    body = DecisionRequest.model_validate(fields)
    encoded = asyncio.run(decisions.encode(body, model))
    assert len({each.prompt_ids[: each.num_shared] for each in encoded}) == 1


@pytest.mark.parametrize("change", range(1, 6))
async def test_a_conversation_is_cut_at_one_time(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    # The name of the next month is longer, so that what fitted would not.
    july, august = datetime.datetime(2026, 7, 31), datetime.datetime(2026, 8, 1)
    tokenizer = with_template("{{ strftime_now('%B') }}" + TURNS)
    tokenizer.probe_template()
    turn = TurnRequest(request_id="r", messages=4 * MESSAGES)

    async def length(space: int, times: Iterator[datetime.datetime]) -> int | None:
        info = make_info(vocab_size=tokenizer.vocab_size, max_model_len=space)
        there = replace(model, tokenizer=tokenizer.limited(space), info=info)
        let_time_pass(monkeypatch, times)
        try:
            return len((await prepare_fitting(turn, there)).prompt_ids)
        except ContextLengthError:
            return None

    for space in range(20, 180):
        changing = await length(space, chain(repeat(july, change), repeat(august)))
        assert changing == await length(space, repeat(july))


async def test_results_are_appended_behind_their_call(model: GenerationModel) -> None:
    # What the template writes with the results is compared with what it writes without.
    tokenizer = Tokens(
        "{% if messages[-1].role == 'tool' and not messages[-2].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}" + TIMED.replace("}}{% endfor", "}}${% endfor")
    )
    model = replace(model, tokenizer=cast("Any", tokenizer))
    result = {"role": "tool", "content": "seen", "tool_call_id": "1"}
    item = RolloutItem.model_validate({"token_ids": [1, 2], "append_messages": [result]})
    body = RolloutRequest.model_validate({"model": "m", "prompts": [item]})
    (prompt,) = await encode_items([item], body, model, Images(MediaLimits()))
    assert tokenizer.decode(prompt.token_ids[2:]).startswith("$<tool>seen")
