"""The clients' requests: exercises that the embedded model knows (``docs/demo-model.md``)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

SUM = "What is 17 + 25?"
WEATHER = "What is the weather in Paris?"
WEATHER_RESULT = '{"temperature": 21, "sky": "sunny"}'
EXTRACT = "Give me JSON with name and age: Anna is 31 years old."

WEATHER_FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city."}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER_TOOL: dict[str, Any] = {"type": "function", "function": WEATHER_FUNCTION}


class Person(BaseModel):
    """Somebody named in a text."""

    name: str
    age: int


ANNA = Person(name="Anna", age=31)


def user(text: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": text}


def tells_the_result(answer: str) -> bool:
    """True if an answer says what ``WEATHER_RESULT`` says."""
    return "21" in answer and "sunny" in answer
