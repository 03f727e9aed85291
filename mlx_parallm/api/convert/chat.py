"""Events of a chat request to ``chat.completion`` objects and chunks."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.convert.answer import AnswerHead, Sample, Usage, chunk_usage
from mlx_parallm.api.convert.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mlx_parallm.api.reasoning import ReasoningSplitter
from mlx_parallm.api.schemas.chat import ChatRequest
from mlx_parallm.outputs import PromptEvent, TokenEvent


class ChatAnswer:
    """Builds the answer to one chat request, whole or chunk by chunk."""

    def __init__(
        self,
        body: ChatRequest,
        head: AnswerHead,
        names: TokenNames,
        prompt_ids: tuple[int, ...],
        splitters: list[ReasoningSplitter] | None,
    ) -> None:
        self._body = body
        self._head = head
        self._names = names
        self._prompt_ids = prompt_ids
        self._splitters = splitters
        self._samples = [Sample() for _ in range(body.n)]
        self._reasoning = [""] * body.n
        self._content = [body.echoed()] * body.n
        self._prompt: PromptEvent | None = None
        self.usage = Usage(prompt_tokens=len(prompt_ids))

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self._prompt = event
            return
        self._samples[event.index].add(event)
        reasoning, content = self._split(event)
        self._reasoning[event.index] += reasoning
        self._content[event.index] += content

    def whole(self) -> dict[str, Any]:
        """The ``chat.completion`` object, once every event is in."""
        choices = [self._choice(index, sample) for index, sample in enumerate(self._samples)]
        answer = self._head.keys() | {
            "choices": choices,
            "usage": self.usage.body(),
            "service_tier": "default",
            "system_fingerprint": None,
        }
        if self._prompt is not None and self._prompt.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt.prompt_logprobs, self._names)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompt_ids)
        return answer

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of every choice."""
        delta = {"role": "assistant", "content": ""}
        chunks = [self._chunk(i, delta, None) for i in range(self._body.n)]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._prompt_ids)
        echoed = self._body.echoed()
        if echoed:
            chunks += [self._chunk(i, {"content": echoed}, None) for i in range(self._body.n)]
        return chunks

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """What an event adds to a stream; often one chunk, sometimes none."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            if event.prompt_logprobs is None:
                return []
            # With a choice: clients take a chunk without for the one of usage.
            scores = prompt_logprobs(event.prompt_logprobs, self._names)
            return [self._chunk(0, {}, None) | {"prompt_logprobs": scores}]
        chunks = []
        delta = self._delta(event)
        if delta or event.logprobs or (self._body.return_token_ids and event.token_ids):
            chunks.append(self._chunk(event.index, delta, event))
        if event.finish_reason is not None:
            last = self._chunk(event.index, {}, None)
            last["choices"][0]["finish_reason"] = str(event.finish_reason)
            last["choices"][0]["stop_reason"] = event.stop_reason
            chunks.append(last)
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """What follows the last choice: usage, if asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._head.keys() | {"choices": [], "usage": self.usage.body()}]

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        reasoning, content = self._reasoning[index], self._content[index]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(sample.logprobs, self._names)
            if self._body.logprobs
            else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def _split(self, event: TokenEvent) -> tuple[str, str]:
        """The reasoning and the content an event makes certain; counts reasoning tokens."""
        if self._splitters is None:
            return "", event.text
        splitter = self._splitters[event.index]
        reasoning, content = splitter.add(event.text)
        if splitter.is_reasoning:
            self.usage.reasoning_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            late = splitter.flush()
            reasoning, content = reasoning + late[0], content + late[1]
        return reasoning, content

    def _delta(self, event: TokenEvent) -> dict[str, Any]:
        reasoning, content = self._split(event)
        delta: dict[str, Any] = {"content": content} if content else {}
        if reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return delta

    def _chunk(self, index: int, delta: dict[str, Any], event: TokenEvent | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if event is not None and self._body.logprobs and event.logprobs:
            choice["logprobs"] = chat_logprobs(event.logprobs, self._names)
        if event is not None and self._body.return_token_ids:
            choice["token_ids"] = list(event.token_ids)
        usage = chunk_usage(self.usage, self._body.stream_options)
        return self._head.keys() | {"choices": [choice]} | usage
