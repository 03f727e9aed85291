"""verifiers' ``TrainClient`` with renderers: turns through ``/inference/v1/generate``."""

from __future__ import annotations

import asyncio
import math

import pytest
from exercises import SUM, user, write_peft_adapter
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

DIALECT = ChatDialect()


@pytest.fixture
def config(server):
    return TrainClientConfig(
        base_url=f"{server.url}/v1",
        api_key_var="NO_SUCH_KEY",
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=str(server.folder),
    )


def ask(config, model, messages, *, turn=None, session="trace-1", tools=None, **sampling):
    """Return a turn by the client."""

    async def run():
        client = TrainClient(config)
        try:
            body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
            return await client.get_response(
                DIALECT, body, SamplingConfig(**sampling), session_id=session, turn=turn
            )
        finally:
            await client.close()

    return asyncio.run(run())


def check_tokens(response):
    tokens = response.tokens
    assert len(tokens.completion_ids) == len(tokens.completion_logprobs) > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in tokens.completion_logprobs)
    assert -9999.0 not in tokens.completion_logprobs
    return tokens


def test_turn(config, server):
    response = ask(config, server.model, [user(SUM)], temperature=0.0, max_tokens=32)
    assert "42" in response.message.content
    assert response.finish_reason == "stop"
    tokens = check_tokens(response)
    # The sampled ids include the end of the turn.
    end = server.ok("/tokenize", {"model": server.model, "prompt": "<|im_end|>"}).json()["tokens"]
    assert tokens.completion_ids[-1:] == end
    assert response.raw["choices"][0]["message"]["content"] == response.message.content
    assert response.id


def test_prompt_is_that_of_the_chat_template(config, server):
    response = ask(config, server.model, [user(SUM)], temperature=0.0, max_tokens=2)
    chat = server.ok(
        "/v1/chat/completions",
        {
            "model": server.model,
            "messages": [user(SUM)],
            "max_tokens": 2,
            "temperature": 0.0,
            "return_token_ids": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ).json()
    assert response.tokens.prompt_ids == chat["prompt_token_ids"]
    assert response.tokens.completion_ids == chat["choices"][0]["token_ids"]


def test_cut_turn_and_seed(config, server):
    options = {"max_tokens": 3, "temperature": 1.0, "seed": 11, "top_p": 0.9, "min_p": 0.01}
    first = ask(config, server.model, [user("Tell me something.")], **options)
    again = ask(config, server.model, [user("Tell me something.")], **options)
    assert first.finish_reason == "length"
    assert len(check_tokens(first).completion_ids) == 3
    assert first.tokens.completion_ids == again.tokens.completion_ids


def test_without_max_tokens_the_context_is_the_limit(config, server):
    """Check that the limit is not the 16 tokens of vLLM's completions."""
    question = [user("Count from 1 to 15.")]
    response = ask(config, server.model, question, temperature=0.0)
    assert len(check_tokens(response).completion_ids) > 16
    assert response.finish_reason == "stop"


def test_cache_salt_and_priority(config, server):
    for salt in ("policy-1", "policy-2"):
        response = ask(
            config, server.model, [user(SUM)], temperature=0.0, max_tokens=24, cache_salt=salt
        )
        assert "42" in response.message.content


def test_second_turn_continues_the_tokens_of_the_first(config, server):
    """Check that the second prompt begins with all ids of the first turn, sampled ones included."""
    trace = Trace.model_construct(nodes=[], calls=[], tools=[])
    first_turn = prepare_turn(
        trace, DIALECT.parse_request({"model": server.model, "messages": [user(SUM)]}).messages
    )
    first = ask(config, server.model, [user(SUM)], turn=first_turn, temperature=0.0, max_tokens=32)
    first_turn.commit(first)
    said = {"role": "assistant", "content": first.message.content}
    messages = [user(SUM), said, user("What is 20 + 30?")]
    parsed = DIALECT.parse_request({"model": server.model, "messages": messages}).messages
    second_turn = prepare_turn(trace, parsed)
    second = ask(config, server.model, messages, turn=second_turn, temperature=0.0, max_tokens=32)
    whole = first.tokens.prompt_ids + first.tokens.completion_ids
    assert second.tokens.bridged
    assert second.tokens.prompt_ids[: len(whole)] == whole
    assert "50" in second.message.content


def test_tool_call(config, server):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Look up the weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    response = ask(
        config,
        server.model,
        [user("What is the weather in Paris?")],
        tools=[tool],
        temperature=0.0,
        max_tokens=64,
    )
    check_tokens(response)
    assert response.finish_reason in ("stop", "tool_calls")


def test_adapter_by_name(config, server):
    """Sample a run's policy by its adapter's name; the base's tokenizer renders it."""
    folder = write_peft_adapter(server.adapters / "verifiers-policy", seed=3)
    server.ok("/v1/load_lora_adapter", {"lora_name": "policy-v1", "lora_path": str(folder)})
    base = ask(config, server.model, [user(SUM)], temperature=0.0, max_tokens=8)
    policy = ask(config, "policy-v1", [user(SUM)], temperature=0.0, max_tokens=8)
    check_tokens(policy)
    assert policy.tokens.prompt_ids == base.tokens.prompt_ids
    assert policy.tokens.completion_logprobs != base.tokens.completion_logprobs


def test_too_long_a_prompt_is_a_bad_request(config, server):
    """Check that the client reads ``max_model_len`` from /v1/models and refuses by itself."""
    with pytest.raises(ProviderError) as caught:
        ask(config, server.model, [user("word " * 20000)], max_tokens=1)
    assert caught.value.status_code == 400


def test_model_that_is_not_served(config):
    with pytest.raises(ProviderError) as caught:
        ask(config, "no-such-model", [user(SUM)], max_tokens=1)
    assert caught.value.status_code == 404
