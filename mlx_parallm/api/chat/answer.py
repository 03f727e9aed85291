"""From a turn's parts to ``chat.completion`` objects and chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from typing_extensions import override

from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.control.art.policies import PolicySpans
from mlx_parallm.api.http.sse import TextEvents, data
from mlx_parallm.api.turns.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.prepare import PreparedTurn
from mlx_parallm.api.turns.samples import (
    Answer,
    Chunk,
    answer_head,
    chunk_usage,
    closing_chunks,
    is_in_between,
    usage_body,
)
from mlx_parallm.api.turns.stream import (
    TOOL_CALLS,
    SampleState,
    ToolCall,
    ToolCallEnd,
    TurnPart,
)
from mlx_parallm.parsing.parts import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_parallm.types.events import PromptEvent, TokenEvent

#: Stores a ``chat.completion``.
KeepAnswer = Callable[[dict[str, Any]], Awaitable[None]]
OBJECT = "chat.completion"
REASONING_KEYS = ("reasoning", "reasoning_content")


class ChatAnswer(Answer):
    """Builds the answer to one chat request, whole or chunk by chunk."""

    def __init__(
        self,
        body: ChatRequest,
        admitted: Admitted,
        prepared: PreparedTurn,
        spans: PolicySpans | None = None,
        keep: KeepAnswer | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            body: of the request.
            admitted: the request.
            prepared: the turn that answers.
            spans: those of ART's policies, if they are wanted.
            keep: stores the whole answer; None: it is not stored.
        """
        self._body = body
        self._keep = keep
        kind = f"{OBJECT}.chunk" if body.stream else OBJECT
        self._head = answer_head(admitted, prepared.request.request_id, kind)
        self._names = TokenNames(admitted.model.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._spans = spans
        self._prepared = prepared
        self._stream = prepared.stream()
        self._echoed = body.echoed()
        self._has_logprobs = body.top() is not None
        options = body.stream_options
        # Nothing of a chunk between the first and the last depends on the event but its text.
        self._varies_in_text = not (
            self._has_logprobs
            or body.return_token_ids
            or (options is not None and options.tells_usage_so_far)
        )
        self._text_keys: dict[type[TurnPart], Sequence[str]] = {ContentText: ("content",)}
        if body.include_reasoning:
            self._text_keys[ReasoningText] = REASONING_KEYS
        self._prepared_events: dict[tuple[int, type[TurnPart]], TextEvents] = {}
        self._custom = {tool.name for tool in prepared.turn.tools if tool.is_custom}

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""
        self._stream.add(event)

    def whole(self) -> dict[str, Any]:
        """Return the ``chat.completion`` object, once every event is in."""
        samples = self._stream.samples
        answer = self._head | {
            "choices": [self._choice(index, sample) for index, sample in enumerate(samples)],
            "usage": usage_body(self._stream.usage),
            "service_tier": "default",
            # vLLM's, which are null where they are not asked for.
            "prompt_logprobs": None,
            "prompt_token_ids": list(self._prepared.prompt_ids)
            if self._body.return_token_ids
            else None,
        }
        prompt = self._stream.prompt
        if prompt is not None and prompt.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(prompt.prompt_logprobs, self._names)
        return answer

    @override
    async def settle(self) -> None:
        if self._keep is not None:
            await self._keep(self.whole() | {"object": OBJECT})

    def opening(self, prompt: PromptEvent | None) -> list[dict[str, Any]]:
        """Return the first chunk of every choice."""
        delta = {"role": "assistant", "content": ""}
        chunks = [self._chunk(i, delta, None) for i in range(self._body.n)]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._prepared.prompt_ids)
        if self._echoed:
            chunks += [self._chunk(i, {"content": self._echoed}, None) for i in range(self._body.n)]
        return chunks

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """Return what an event adds to a stream; often one chunk, sometimes none."""
        return self._chunks(event, self._stream.add(event))

    @override
    def encoded(
        self, prompt: int, event: PromptEvent | TokenEvent, encode: Callable[..., bytes]
    ) -> bytes:
        """Most events add one text, and an event for that is prepared."""
        parts = self._stream.add(event)
        if self._varies_in_text and len(parts) == 1 and is_in_between(event) and encode is data:
            (part,) = parts
            keys = self._text_keys.get(type(part))
            if keys is not None and isinstance(part, ContentText | ReasoningText):
                return self._text_events(event.index, type(part), keys).event(part.text)
        chunks = self._chunks(event, parts)
        return encode(*chunks) if chunks else b""

    def _text_events(self, index: int, kind: type[TurnPart], keys: Sequence[str]) -> TextEvents:
        """Return what writes the chunks of a sample that add a text of one kind."""
        prepared = self._prepared_events.get((index, kind))
        if prepared is None:
            chunk = self._chunk(index, dict.fromkeys(keys, ""), None)
            prepared = TextEvents(chunk, keys)
            self._prepared_events[index, kind] = prepared
        return prepared

    def _chunks(
        self, event: PromptEvent | TokenEvent, parts: list[TurnPart]
    ) -> list[dict[str, Any]]:
        if isinstance(event, PromptEvent):
            if event.prompt_logprobs is None:
                return []
            # With a choice: clients take a chunk without for the one of usage.
            scores = prompt_logprobs(event.prompt_logprobs, self._names)
            return [self._chunk(0, {}, None) | {"prompt_logprobs": scores}]
        sample = self._stream.samples[event.index]
        deltas = self._deltas(sample, parts)
        if not deltas and (event.logprobs or (self._body.return_token_ids and event.token_ids)):
            deltas = [dict[str, Any]()]
        # Log-probabilities and ids of an event go with the first of its deltas.
        chunks = [
            self._chunk(event.index, delta, event if number == 0 else None)
            for number, delta in enumerate(deltas)
        ]
        if event.finish_reason is not None:
            last = self._chunk(event.index, {}, None)
            last["choices"][0]["finish_reason"] = self._finish_reason(sample)
            last["choices"][0]["stop_reason"] = event.stop_reason
            last["choices"][0]["matched_stop"] = sample.raw.matched_stop
            last["choices"][0] |= self._versions(sample)
            chunks.append(last)
        return chunks

    def closing(self) -> list[Chunk]:
        """Return what follows the last choice: usage, if the client wants it."""
        return closing_chunks(self._head, self._stream.usage, self._body.stream_options)

    def _choice(self, index: int, sample: SampleState) -> dict[str, Any]:
        raw = sample.raw
        choice: dict[str, Any] = {
            "index": index,
            "message": self._message(sample),
            "logprobs": chat_logprobs(raw.logprobs, self._names) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(sample),
            "stop_reason": raw.stop_reason,
            "matched_stop": raw.matched_stop,
            "token_ids": raw.token_ids if self._body.return_token_ids else None,
        }
        return choice | self._versions(sample)

    def _versions(self, sample: SampleState) -> dict[str, Any]:
        """Which weights made which tokens, in the forms that are wanted."""
        versions = sample.raw.versions
        spans = {} if self._spans is None else self._spans.of(versions)
        if self._body.return_weight_versions:
            spans["weight_versions"] = versions.to_json()
        return spans

    def _message(self, sample: SampleState) -> dict[str, Any]:
        content = self._echoed + sample.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if sample.reasoning and self._body.include_reasoning:
            message |= {"reasoning": sample.reasoning, "reasoning_content": sample.reasoning}
        if sample.calls:
            message["content"] = content if content.strip() else None
            message |= self._calls(sample.calls)
        return message

    def _calls(self, calls: list[ToolCall]) -> dict[str, Any]:
        if self._body.is_function_call:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._custom:
            custom = {"name": call.name, "input": call.custom_input}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def _finish_reason(self, sample: SampleState) -> str | None:
        reason = sample.finish_reason
        if reason != TOOL_CALLS:
            return reason
        if self._body.is_function_call:
            return "function_call"
        # OpenAI and vLLM report so what the caller named itself.
        return "stop" if self._prepared.turn.tool_choice.is_named else reason

    def _deltas(self, sample: SampleState, parts: list[TurnPart]) -> list[dict[str, Any]]:
        """Return a delta for each part: clients take one with two kinds of text for either."""
        deltas = (
            self._text_delta(part)
            if isinstance(part, ReasoningText | ContentText)
            else self._call_delta(sample, part)
            for part in parts
        )
        return [delta for delta in deltas if delta]

    def _text_delta(self, part: ReasoningText | ContentText) -> dict[str, Any]:
        return dict.fromkeys(self._text_keys.get(type(part), ()), part.text)

    def _call_delta(self, sample: SampleState, part: TurnPart) -> dict[str, Any] | None:
        """Return the delta of a call's part; None where it has none."""
        if not isinstance(part, ToolCallBegin | ToolCallArguments | ToolCallEnd):
            return None
        call = sample.calls[part.index]
        if call.name in self._custom:
            # A text within JSON is known when the JSON is complete.
            whole = {"index": part.index} | self._call(call)
            return {"tool_calls": [whole]} if isinstance(part, ToolCallEnd) else None
        if isinstance(part, ToolCallBegin):
            function = {"name": part.name, "arguments": ""}
            head = {"id": call.id, "type": "function"}
        elif isinstance(part, ToolCallArguments):
            function, head = {"arguments": part.text}, {}
        else:
            return None
        if self._body.is_function_call:
            return {"function_call": function}
        return {"tool_calls": [{"index": part.index} | head | {"function": function}]}

    def _chunk(self, index: int, delta: dict[str, Any], event: TokenEvent | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if event is not None and self._has_logprobs and event.logprobs:
            choice["logprobs"] = chat_logprobs(event.logprobs, self._names)
        if event is not None and self._body.return_token_ids:
            choice["token_ids"] = list(event.token_ids)
        usage = chunk_usage(self._stream.usage, self._body.stream_options)
        return self._head | {"choices": [choice]} | usage
