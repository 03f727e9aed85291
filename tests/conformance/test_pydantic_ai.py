"""pydantic-ai: an agent with a tool, and typed output, on chat completions and responses."""

from __future__ import annotations

import pytest
from exercises import ANNA, EXTRACT, WEATHER, WEATHER_RESULT, Person, tells_the_result
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


@pytest.fixture(params=list(MODELS))
async def model(server, request):
    async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        yield MODELS[request.param](server.model, provider=OpenAIProvider(openai_client=client))


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_tool_round_trip(model, streams):
    agent = Agent(model, model_settings={"temperature": 0.0})
    cities = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        cities.append(city)
        return WEATHER_RESULT

    if streams:
        async with agent.run_stream(WEATHER) as run:
            output = await run.get_output()
    else:
        output = (await agent.run(WEATHER)).output
    assert cities == ["Paris"]
    assert tells_the_result(output)


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput], ids=["by tool", "by schema"])
async def test_structured_output(model, output):
    agent = Agent(model, output_type=output(Person), model_settings={"temperature": 0.0})
    assert (await agent.run(EXTRACT)).output == ANNA
