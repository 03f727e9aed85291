"""``LLM`` has what users of vLLM look for: structured outputs, its tokenizer, sleep."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm import LLM, SamplingParams, StructuredOutputsParams
from mlx_parallm.config import CacheConfig
from mlx_parallm.types.errors import InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"format": {"type": "regex", "pattern": "[xy]{2}"}}
GRAMMAR = 'start: "left" | "right"'
PROMPT = "1, 2, 3,"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def is_value(text: str) -> bool:
    return 0 <= json.loads(text)["a"] <= 99


STRUCTURES: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"json": SCHEMA}, is_value),
    ({"json": json.dumps(SCHEMA)}, is_value),
    (
        {"json": SCHEMA, "disable_any_whitespace": True},
        lambda text: re.fullmatch(r'\{"a":\d+\}', text),
    ),
    ({"regex": "[a-c]{3}"}, lambda text: re.fullmatch("[a-c]{3}", text)),
    ({"choice": ("cat", "dog")}, lambda text: text in ("cat", "dog")),
    ({"grammar": GRAMMAR}, lambda text: text in ("left", "right")),
    ({"structural_tag": TAG}, lambda text: re.fullmatch("[xy]{2}", text)),
    ({"structural_tag": json.dumps(TAG)}, lambda text: re.fullmatch("[xy]{2}", text)),
    ({"json_object": True}, lambda text: text.startswith("{")),
]
REFUSED = [
    ({}, "names nothing"),
    ({"json_object": False}, "names nothing"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice"),
    ({"json": SCHEMA, "whitespace_pattern": " "}, "whitespace_pattern"),
    ({"json": SCHEMA, "disable_additional_properties": True}, "disable_additional_properties"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
    ({"json": "{"}, "not JSON"),
    ({"choice": []}, "one or more"),
    ({"regex": "("}, "regex"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(cache=CacheConfig(kv_cache_bytes=1 << 26))


def test_every_kind_of_structure_holds_in_one_batch(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(**fields))
        for fields, _ in STRUCTURES
    ]
    outputs = llm.generate([PROMPT] * len(params), params)
    for output, (fields, holds) in zip(outputs, STRUCTURES, strict=True):
        assert holds(output.outputs[0].text), fields
    named = {name for fields, _ in STRUCTURES for name in fields}
    refused = {"disable_additional_properties", "whitespace_pattern"}
    assert named | refused == set(StructuredOutputsParams.__dataclass_fields__)


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_enforced_is_refused(llm: LLM, fields: dict[str, Any], message: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        llm.generate(PROMPT, params)
    assert refusal.value.param == "structured_outputs"


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer: Any = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    text = "Sort these numbers: 9 4 é 7"
    assert tokenizer.encode(text) == llm.tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    chat = [{"role": "user", "content": "What is 17 + 25?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    (whole,), (written,) = llm.chat(chat, GREEDY), llm.generate(prompt, GREEDY)
    assert written.outputs[0].text == whole.outputs[0].text


def test_the_tokenizer_has_the_template_of_the_llm() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    llm = LLM(cache=CacheConfig(kv_cache_bytes=1 << 26), chat_template=template)
    tokenizer: Any = llm.get_tokenizer()
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "[a]"
    )


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_changes_no_token(llm: LLM, level: int) -> None:
    (before,) = llm.generate(PROMPT, GREEDY)
    awake = mx.get_active_memory()
    llm.sleep(level)
    info = llm._model.info
    promised = info.kv_bytes + (info.weight_bytes if level == 2 else 0)
    assert awake - mx.get_active_memory() >= 0.9 * promised
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(PROMPT, GREEDY),
        lambda: llm.load_adapter("a", "/nowhere"),
        lambda: llm.unload_adapter("a"),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match="asleep"):
            call()
    assert llm.get_tokenizer() is not None
    llm.wake_up(["weights"])
    with pytest.raises(InvalidRequestError, match="asleep"):
        llm.generate(PROMPT, GREEDY)
    llm.wake_up()
    llm.wake_up()
    (after,) = llm.generate(PROMPT, GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.parametrize("levels", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_sleep_may_be_deepened_and_woken_from_in_parts(
    llm: LLM, levels: tuple[int, int], tag: str
) -> None:
    (before,) = llm.generate(PROMPT, GREEDY)
    llm.sleep(levels[0])
    llm.wake_up([tag])
    llm.sleep(levels[1])
    llm.wake_up(["kv_cache"])
    llm.wake_up(["weights"])
    (after,) = llm.generate(PROMPT, GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_levels_and_tags_are_checked(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="level"):
        llm.sleep(3)
    with pytest.raises(InvalidRequestError, match="tags"):
        llm.wake_up(["all"])
    with LLM("demo:embed") as pooling, pytest.raises(InvalidRequestError, match="pooling model"):
        pooling.sleep()
