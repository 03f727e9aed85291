"""The chat template of the demonstration model, and its tokenizer."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from demo.chat_format import IM_END, MARKER_TOKENS, ChatFormat, template_text
from demo.compose import training_example
from demo.example import Example, ToolCall, user
from demo.packing import Shard, encode_conversations, pack_shard
from mlx_parallm.demo_models.folders import DEMO_FOLDER

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


def render(messages: list[dict], **options: object) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template_text()).render(messages=messages, **options)


def test_a_plain_conversation_is_chatml():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, "assistant\n"),
        ({"enable_thinking": True}, "assistant\n"),
        ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_turned_off_by_an_empty_block(options: dict, ending: str):
    text = render([{"role": "user", "content": "Hi"}], add_generation_prompt=True, **options)
    assert text.endswith("<|im_start|>" + ending)


@pytest.mark.parametrize("arguments", [{"x": "é"}, '{"x": "é"}'])
def test_tools_calls_and_results_have_their_markers(arguments: object):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    marked = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    text = render(messages, tools=[TOOL])
    assert '<tools>\n{"name": "f", "parameters": {"type": "object"}}\n</tools>' in text
    assert f"<|im_start|>assistant\n{marked}\n{marked}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_what_the_model_learns_to_write_is_what_the_template_renders_later():
    example = Example(
        task="t", key="k", messages=(user("go"),), tools=(TOOL,), calls=(ToolCall("f", {"x": 1}),)
    )
    chat = ChatFormat()
    written = chat.prompt(example, thinking=True) + chat.target(example, thinking=True)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    later = [user("go"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render(later, tools=[TOOL]) == written + "\n"


def test_the_stored_template_is_the_source_template():
    config = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    assert config["chat_template"] == template_text()
    assert config["eos_token"] == IM_END


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str):
    shipped = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    assert shipped.decode(shipped.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer):
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]


def test_markers_are_single_tokens_that_decoding_keeps(tokenizer: Tokenizer):
    for marker in MARKER_TOKENS:
        ids = tokenizer.encode(marker).ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == marker
    assert tokenizer.decode(tokenizer.encode(IM_END).ids, skip_special_tokens=True) == ""


def test_prompt_and_answer_tokenised_apart_equal_the_whole(tokenizer: Tokenizer):
    chat, rng = ChatFormat(), Random(4)
    for _ in range(200):
        example = training_example(rng)
        prompt = chat.prompt(example, thinking=True)
        target = chat.target(example, thinking=True)
        apart = tokenizer.encode(prompt).ids + tokenizer.encode(target).ids
        assert tokenizer.encode(prompt + target).ids == apart


def test_packed_rows_hold_whole_conversations_and_weigh_answers_only(tokenizer: Tokenizer):
    file = DEMO_FOLDER / "tokenizer.json"
    rows = pack_shard(Shard(file, conversations=60, seed=9))
    wanted = sorted(encode_conversations(tokenizer, 60, seed=9))
    batches = []
    for row in range(len(rows)):
        for number in range(1, int(rows.segments[row].max()) + 1):
            inside = rows.segments[row] == number
            ids, weighed = rows.tokens[row][inside], rows.weights[row][inside]
            assert (rows.labels[row][inside][:-1] == ids[1:]).all()
            assert not weighed[-1]
            batches.append((ids.tolist(), len(ids) - int(weighed.sum())))
    assert sorted(batches) == wanted
    assert not rows.weights[rows.segments == 0].any()
