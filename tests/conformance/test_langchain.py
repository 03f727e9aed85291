"""langchain's standard integration suites for chat models, through ``ChatOpenAI``."""

from __future__ import annotations

from typing import Any

import pytest
from exercises import ANNA, EXTRACT, SUM, WEATHER, WEATHER_RESULT, Person, tells_the_result
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

# What a model of 4.9 million parameters cannot do, which knows the exercises of
# docs/demo-model.md and nothing else, and the test here that takes the same step with one of them.
TOO_SMALL = {
    "test_tool_calling": (
        "it calls magic_function, with a number other than the 3 of the question"
        " (the same step: test_forced_call_it_knows)"
    ),
    "test_tool_calling_async": (
        "it calls magic_function, with a number other than the 3 of the question"
        " (the same step: test_forced_call_it_knows)"
    ),
    "test_json_mode": (
        "it writes valid JSON, with keys other than the two that the prompt asks for"
        " (the same step: test_json_mode_it_knows)"
    ),
    "test_unicode_tool_call_integration": (
        "it cannot copy Chinese or Japanese (the same step: test_unicode_arguments)"
    ),
}


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return WEATHER_RESULT


class Suite(ChatModelIntegrationTests):
    """The suite on a live server, and the steps that its prompts are too hard for."""

    responses = False

    @pytest.fixture(autouse=True)
    def _connect(self, server: Any, request: pytest.FixtureRequest) -> None:
        type(self).connection = server
        reason = TOO_SMALL.get(request.node.originalname)
        if reason:
            pytest.skip(f"the model is too small: {reason}")

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        server = self.connection
        return {
            "model": server.model,
            "base_url": server.base_url,
            "api_key": server.api_key,
            "temperature": 0,
            "max_tokens": 400,
            "stream_usage": True,
            "use_responses_api": self.responses,
            # Asked for what it does not know the model thinks without end,
            "reasoning_effort": "none",
            # and calls a tool for San Francisco, and again for CA.
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        # Without it a schema allows more properties, and the model writes one without end.
        return {"strict": True}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return self.connection.model

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        details = ["reasoning_output", "cache_read_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        params = self.chat_model_params | {"reasoning_effort": "high"}
        return _message_of(ChatOpenAI(**params), stream, SUM)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatOpenAI(**self.chat_model_params)
        question = f"Count the items: {'apple, ' * 40}apple"
        model.invoke(question)
        return _message_of(model, stream, question)

    @pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
    def test_tool_round_trip(self, model: Any, streams: bool) -> None:
        with_tool = model.bind_tools([get_weather])
        message = _message_of(with_tool, streams, [HumanMessage(WEATHER)])
        (call,) = message.tool_calls
        assert call["args"] == {"city": "Paris"}
        messages = [HumanMessage(WEATHER), message, get_weather.invoke(call)]
        assert tells_the_result(_message_of(with_tool, streams, messages).text)

    @pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
    def test_forced_call_it_knows(self, model: Any, streams: bool) -> None:
        with_tool = model.bind_tools([get_weather], tool_choice="any")
        message = _message_of(with_tool, streams, WEATHER)
        (call,) = message.tool_calls
        assert call["name"] == "get_weather"
        assert call["args"] == {"city": "Paris"}
        assert call["id"]
        (block,) = [block for block in message.content_blocks if block["type"] == "tool_call"]
        assert block["args"] == {"city": "Paris"}

    async def test_forced_call_it_knows_async(self, model: Any) -> None:
        with_tool = model.bind_tools([get_weather], tool_choice="any")
        (call,) = (await with_tool.ainvoke(WEATHER)).tool_calls
        assert call["args"] == {"city": "Paris"}

    def test_json_mode_it_knows(self, model: Any) -> None:
        typed = model.with_structured_output(Person, method="json_mode")
        assert typed.invoke(EXTRACT) == ANNA
        assert list(typed.stream(EXTRACT))[-1] == ANNA

    @pytest.mark.parametrize("name", ["你好啊集团", "こんにちは株式会社"])
    @pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
    def test_unicode_arguments(self, model: Any, name: str, streams: bool) -> None:
        customer = {
            "title": "create_customer",
            "description": "Create a customer.",
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}},
            "required": ["name"],
        }
        with_tool = model.bind_tools([customer], tool_choice="any")
        (call,) = _message_of(with_tool, streams, f"Create a customer named {name}").tool_calls
        assert call["args"] == {"name": name}


def _message_of(model: Any, streams: bool, messages: Any) -> AIMessage:
    if not streams:
        return model.invoke(messages)
    full: AIMessageChunk | None = None
    for chunk in model.stream(messages):
        full = chunk if full is None else full + chunk
    assert full is not None
    return full


class TestChat(Suite):
    """By chat completions."""


class TestResponses(Suite):
    """By responses."""

    responses = True
