"""Chats that the parts of ``benchmarks.hybrid`` send, with the OpenAI client."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from tokenizers import Tokenizer

from benchmarks.measure import BenchmarkError, load_tokenizer, text_of_tokens
from benchmarks.servers import Server

# ANSWER_TOKENS: new tokens of an answer.
ANSWER_TOKENS = 16
# WARM_UP_TOKENS: of the prompts that bring a server to its working state.
WARM_UP_TOKENS = 600
# FRAMES: what the template writes around the messages of a turn.
FRAMES = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a server.

    Attributes:
        first_s: seconds until its first token.
        processor_s: processor time of the server until then.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those that were not computed.
        text: the answer.
    """

    first_s: float
    processor_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.cached_tokens


class Chat:
    """A conversation, each of whose turns adds as many tokens to the prompt."""

    def __init__(
        self, tokenizer: Tokenizer, *, system_tokens: int, turn_tokens: int, seed: str
    ) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._question_tokens = turn_tokens - ANSWER_TOKENS - len(tokenizer.encode(FRAMES).ids)
        system = text_of_tokens(tokenizer, system_tokens, f"{seed} system")
        #: ``messages``: those of the next request.
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    @property
    def num_turns(self) -> int:
        """Turns that were begun."""
        return len(self.messages) // 2

    def begin_turn(self) -> None:
        """Add the next question."""
        seed = f"{self._seed} {self.num_turns}"
        question = text_of_tokens(self._tokenizer, self._question_tokens, seed)
        self.messages.append({"role": "user", "content": question})

    def end_turn(self, text: str) -> None:
        """Add the answer."""
        self.messages.append({"role": "assistant", "content": text})


class Chats:
    """Makes chats of the benchmark's model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = load_tokenizer(model)

    def chat(self, seed: str, *, system_tokens: int, turn_tokens: int) -> Chat:
        """Return a chat; other seeds share no block."""
        return Chat(
            self._tokenizer, system_tokens=system_tokens, turn_tokens=turn_tokens, seed=seed
        )

    def warm_up(self, *servers: Server) -> None:
        """Bring servers to their working state."""
        for seed in ("warm 1", "warm 2"):
            chat = self.chat(seed, system_tokens=WARM_UP_TOKENS, turn_tokens=100)
            chat.begin_turn()
            for server in servers:
                ask(server, chat.messages)


def ask(server: Server, messages: Sequence[Any]) -> Answer:
    """Return the greedy answer to messages.

    Raises:
        BenchmarkError: it has no usage.
    """
    first_s = used_s = 0.0
    text, usage = "", None
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        before_s, started = server.processor_s(), time.perf_counter()
        chunks = client.chat.completions.create(
            model=server.model or "default_model",
            messages=list(messages),
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            usage = chunk.usage or usage
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece and not text:
                first_s = time.perf_counter() - started
                used_s = server.processor_s() - before_s
            text += piece or ""
    if usage is None:
        raise BenchmarkError(f"{server.name}: the stream had no usage")
    cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    return Answer(first_s, used_s, usage.prompt_tokens, cached, text)


def median_ms(answers: Sequence[Answer]) -> float:
    """Return the median time to the first token, in milliseconds."""
    return 1e3 * statistics.median(answer.first_s for answer in answers)


def ratio(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Return the median of the ratios of times to the first token, each of the same prompt."""
    pairs = zip(answers, others, strict=True)
    return statistics.median(mine.first_s / other.first_s for mine, other in pairs)


def used_ratio(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Return the median of the ratios of processor times, each of the same prompt."""
    pairs = zip(answers, others, strict=True)
    return statistics.median(mine.processor_s / other.processor_s for mine, other in pairs)


def computed_share(answers: Sequence[Answer]) -> float:
    """Return the share of the prompts' tokens that was computed."""
    return sum(a.computed_tokens for a in answers) / sum(a.prompt_tokens for a in answers)
