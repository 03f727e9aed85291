"""OpenAI's agents: a run that calls a function and answers, on chat completions and responses."""

from __future__ import annotations

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from exercises import ANNA, EXTRACT, WEATHER, WEATHER_RESULT, Person, tells_the_result
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
set_tracing_disabled(True)


@pytest.fixture(params=list(MODELS))
async def model(server, request):
    async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        yield MODELS[request.param](model=server.model, openai_client=client)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_tool_round_trip(model, streams):
    cities = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        cities.append(city)
        return WEATHER_RESULT

    agent = Agent(
        name="helper",
        model=model,
        model_settings=ModelSettings(temperature=0.0),
        tools=[get_weather],
    )
    if streams:
        run = Runner.run_streamed(agent, WEATHER)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, WEATHER)
    assert cities == ["Paris"]
    assert tells_the_result(run.final_output)


async def test_structured_output(model):
    agent = Agent(
        name="extractor",
        model=model,
        model_settings=ModelSettings(temperature=0.0),
        output_type=Person,
    )
    run = await Runner.run(agent, EXTRACT)
    assert run.final_output == ANNA
