"""Chats of a model with a state: what later turns find again, as OpenAI's client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.test_data_parallel import tokens_by_engine
from tests.hybrid_folder import write_hybrid
from tests.server_process import ServerProcess

pytestmark = pytest.mark.one_engine

BLOCK = 16
SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 8}
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: str) -> Message:
    """Return what the model might have said, and thought before."""
    message: Message = {"role": "assistant", "content": text, "reasoning_content": f"So: {text}"}
    for name in calls:
        function = {"name": "look", "arguments": json.dumps({"at": name})}
        call = {"id": name, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    return message


def result(name: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": f"seen {name}"}


ASKED = [SYSTEM, user("What is at a and b?")]
LOOKED = [*ASKED, assistant("I look.", "a"), result("a"), assistant("Once more.", "b"), result("b")]
ANSWERED = [*LOOKED, assistant("There is a door.")]
# CONVERSATIONS of one client, one after the other, in an order in which each finds something.
CONVERSATIONS = {
    "first": ASKED,
    "again": ASKED,
    "a call": LOOKED[:4],
    "two calls": LOOKED,
    "next turn": [*ANSWERED, user("Open it.")],
    "next but one": [*ANSWERED, user("Open it."), assistant("It is open."), user("Thanks!")],
    "another chat": [SYSTEM, user("Who are you?")],
    "edited": [*ANSWERED, user("Close it, and tell me about it.")],
    "short": [user("Hello, you!")],
    "short, next turn": [user("Hello, you!"), assistant("Ho"), user("Bye")],
}


class Chats:
    """Sends requests, and knows the prefixes whose states the server should have kept."""

    def __init__(self, client: openai.OpenAI, url: str, salt: str) -> None:
        self._client = client
        self._url = url
        self._salt = salt
        self._kept: set[tuple[int, ...]] = set()

    def expected(self, messages: Sequence[Message]) -> int:
        """Return how many tokens of a prompt are found; note what it leaves."""
        ids = self._render(messages)
        longest = max(
            (len(prefix) for prefix in self._kept if ids[: len(prefix)] == prefix), default=0
        )
        begin_id = self._render([user("")])[0]
        roles = [message["role"] for message in messages]
        num_before = len(roles) - 1 - roles[::-1].index("user")
        places = [place for place, token_id in enumerate(ids) if token_id == begin_id]
        # What follows the beginning of the answer may be another in the next prompt.
        for end in (places[num_before] + 1, places[-1] + 1):
            self._kept.add(ids[: end // BLOCK * BLOCK])
        return longest

    def _render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        body = {"model": "hybrid", "messages": messages}
        answer = httpx2.post(f"{self._url}/v1/chat/completions/render", json=body)
        return tuple(answer.raise_for_status().json()["token_ids"])

    def ask(self, messages: Sequence[Message], salt: str | None = None) -> tuple[str, int]:
        """Return the answer, and how many tokens of the prompt were cached."""
        completion = self._client.chat.completions.create(
            model="hybrid",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
            extra_body={"cache_salt": salt or self._salt, "separate_reasoning": False},
        )
        assert completion.usage is not None
        details = completion.usage.prompt_tokens_details
        assert details is not None
        return completion.choices[0].message.content or "", details.cached_tokens or 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_hybrid(tmp_path_factory.mktemp("models") / "hybrid")
    server = ServerProcess(
        "--model", str(folder), "--served-model-name", "hybrid", "--dtype", "float32"
    )
    try:
        server.wait_until_ready()
        yield server
        num_kept, num_made = (
            server.metric(f"vllm:state_snapshot{name}") for name in ("s", "_captures_total")
        )
        evicted = server.metric("vllm:state_snapshot_evictions_total")
        assert 0 < num_kept == num_made - evicted
        assert server.metric("vllm:state_snapshot_bytes") % num_kept == 0
    finally:
        server.stop()


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_turns_find_the_states_of_earlier_ones(client: openai.OpenAI, url: str) -> None:
    chats = Chats(client, url, "turns")
    cached: dict[str, int] = {}
    for name, messages in CONVERSATIONS.items():
        expected = chats.expected(messages)
        text, cached[name] = chats.ask(messages)
        assert cached[name] == expected, name
        assert chats.ask(messages, salt=name) == (text, 0), name
    assert [name for name, count in cached.items() if not count] == ["first", "short"]
    assert cached.pop("short, next turn") == BLOCK
    del cached["first"], cached["short"]
    assert min(cached.values()) > len(SYSTEM["content"]) - BLOCK


def test_responses_find_them_too(client: openai.OpenAI) -> None:
    turns = [[SYSTEM, user("Hi!")], [SYSTEM, user("Hi!"), said("Hello!"), user("Bye!")]]
    details = [
        client.responses.create(model="hybrid", input=turn, max_output_tokens=4).usage  # type: ignore[arg-type]
        for turn in turns
    ]
    cached = [each.input_tokens_details.cached_tokens for each in details if each is not None]
    assert cached[0] in (0, cached[1])
    assert cached[1] > len(SYSTEM["content"]) - BLOCK


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_a_beginning_that_texts_share_is_found_once_two_have_shown_it(
    client: openai.OpenAI,
) -> None:
    beginning = "These are examples. " * 30
    num_shared = len(beginning) // BLOCK * BLOCK
    cached = [complete(client, beginning + letter * 40) for letter in "abcd"]
    assert cached == [0, 0, num_shared, num_shared]
    # It may be sent alone before.
    beginning = beginning.upper()
    cached = [complete(client, beginning + letter * 40) for letter in ("", "a", "b")]
    assert cached == [0, *2 * [(len(beginning) - 1) // BLOCK * BLOCK]]


def test_requests_of_one_answer_find_what_they_share(url: str) -> None:
    prompt = list(range(1, 101))
    items = [
        {"prompt_token_ids": prompt, "completion_token_ids": [5 + number] * 24}
        for number in range(3)
    ]
    answer = httpx2.post(f"{url}/v1/rl/logprobs", json={"model": "hybrid", "items": items})
    usage = answer.raise_for_status().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * (100 // BLOCK * BLOCK)
    questions = [
        {"type": "predicate", "instructions": text} for text in ("It is late.", "It is early.")
    ]
    body = {"model": "hybrid", "input": "a long story " * 20, "questions": questions}
    answer = httpx2.post(f"{url}/v1/decisions", json=body)
    usage = answer.raise_for_status().json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > len(str(body["input"]))


def complete(client: openai.OpenAI, prompt: str) -> int:
    """Return how many tokens of a prompt were cached."""
    answer = client.completions.create(model="hybrid", prompt=prompt, max_tokens=4)
    details = answer.usage and answer.usage.prompt_tokens_details
    assert details is not None
    return details.cached_tokens or 0


@pytest.mark.slow
def test_of_two_engines_each_keeps_its_chats_and_beginnings_with_a_state(
    tmp_path: Path,
) -> None:
    folder = write_hybrid(tmp_path / "hybrid")
    flags = ("--served-model-name", "hybrid", "--dtype", "float32", "--data-parallel-size", "2")
    server = ServerProcess("--model", str(folder), *flags)
    try:
        server.wait_until_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            chats = [Chats(client, server.url, f"chat {number}") for number in range(4)]
            turns = [user("One"), assistant("Two."), user("Three"), assistant("Four."), user("5")]
            for length in (1, 3, 5):
                for chat in chats:
                    messages = [SYSTEM, *turns[:length]]
                    assert chat.expected(messages) == chat.ask(messages)[1]
            # Two that begin alike are computed side by side: no state is kept where they part.
            before = tokens_by_engine(server, "hybrid")
            prompts = ["the same words " * 40 + f"{number}, and others " * 4 for number in range(8)]
            assert [complete(client, prompt) for prompt in prompts[:2]] == [0, 0]
            after = tokens_by_engine(server, "hybrid")
            assert [now - then for now, then in zip(after, before, strict=True)] == [4, 4]
            cached = [complete(client, prompt) for prompt in prompts[2:]]
            assert cached == sorted(cached)
            assert cached[-1] == 600 // BLOCK * BLOCK
    finally:
        server.stop()
