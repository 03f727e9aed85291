"""Servers that are killed among 200 conversations: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "mlx-parallm-demo"
NUM_CONVERSATIONS = 200
NUM_CLIENTS = 8
NUM_TURNS = 2
# NUM_BEFORE: turns that are answered before the server is killed.
NUM_BEFORE = 150


@dataclass
class Client:
    """The records that a client knows to be stored.

    Attributes:
        turns: the inputs that were answered, by conversation.
        begun: the input of the turn in flight, by conversation.
        chats: ids of stored chats.
    """

    turns: dict[str, list[str]] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)
    chats: list[str] = field(default_factory=list)


@contextmanager
def connected(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def serve(folder: Path, *flags: str) -> ServerProcess:
    server = ServerProcess(
        *("--max-model-len", "1024", "--data-dir", str(folder), "--disable-access-log"),
        *flags,
        is_forked=False,
    )
    server.wait_until_ready()
    return server


def converse(
    server: ServerProcess, known: Client, names: Iterator[int], done: threading.Semaphore
) -> None:
    """Hold conversations until there are enough, or the server is gone."""
    try:
        with connected(server) as client:
            for number in names:
                conversation = client.conversations.create().id
                known.turns[conversation] = []
                for turn in range(NUM_TURNS):
                    text = known.begun[conversation] = f"{number} + {turn} ="
                    client.responses.create(
                        model=MODEL,
                        input=text,
                        conversation=conversation,
                        max_output_tokens=3,
                        reasoning={"effort": "none"},
                    )
                    known.turns[conversation].append(text)
                    del known.begun[conversation]
                    done.release()
                chat = client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"{number}"}],
                    max_tokens=2,
                    store=True,
                )
                known.chats.append(chat.id)
    except (openai.APIConnectionError, openai.InternalServerError):
        return
    except BaseException:
        # Nobody waits for its answers.
        done.release(NUM_BEFORE)
        raise


@pytest.mark.parametrize(
    "flags",
    [(), ("--api-server-count", "2", "--data-parallel-size", "2")],
    ids=["one process", "two by two"],
)
def test_what_a_client_knows_is_there_once(tmp_path: Path, flags: tuple[str, ...]) -> None:
    server = serve(tmp_path / "data", *flags)
    clients = [Client() for _ in range(NUM_CLIENTS)]
    names = iter(range(NUM_CONVERSATIONS))
    done = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        talks = [pool.submit(converse, server, known, Locked(names), done) for known in clients]
        for _ in range(NUM_BEFORE):
            done.acquire()
        server.stop(signal.SIGKILL)
    for talk in talks:
        talk.result()
    assert next(names, None) is not None, "the server was killed in the middle"
    server = serve(tmp_path / "data", *flags)
    with connected(server) as client:
        for known in clients:
            check(client, known)
        listed = [chat.id for chat in client.chat.completions.list(limit=100)]
    assert len(set(listed)) == len(listed)
    answered = list(itertools.chain.from_iterable(known.chats for known in clients))
    assert set(answered) <= set(listed)
    # A chat of each client may have been stored without its answer having come.
    assert len(listed) <= len(answered) + NUM_CLIENTS
    # The server goes on where it was.
    with connected(server) as client:
        converse(server, clients[0], Locked(names), done)
        check(client, clients[0])
    server.stop()


class Locked:
    """An iterator that several threads share."""

    lock = threading.Lock()

    def __init__(self, names: Iterator[int]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self.lock:
            return next(self._names)


def check(client: openai.OpenAI, known: Client) -> None:
    """Check that the conversations of a client have each turn once, and whole."""
    for conversation, turns in known.turns.items():
        items = list(client.conversations.items.list(conversation, order="asc"))
        assert len({item.id for item in items}) == len(items)
        inputs = [item.content[0].text for item in items if item.role == "user"]  # type: ignore[union-attr]
        roles = [item.role for item in items]  # type: ignore[union-attr]
        assert roles == ["user", "assistant"] * (len(items) // 2)
        # The turn in flight may have been stored without its answer having come.
        begun = known.begun.get(conversation)
        assert inputs == turns or (begun is not None and inputs == [*turns, begun])
