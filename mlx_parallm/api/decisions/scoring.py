"""From questions to engine requests, and from their log-probabilities to probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_parallm.api.continuation import continuation_ids
from mlx_parallm.api.decisions.labels import LabelTree, Tokens
from mlx_parallm.api.decisions.prompt import ANSWER, END_OF_INPUT, TASK, AskedQuestion
from mlx_parallm.api.generation import Generation
from mlx_parallm.generation.model import GenerationModel, Tokenizer
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import RequestAbortedError
from mlx_parallm.types.events import FinishReason, PromptEvent
from mlx_parallm.types.request import RAW_LOGPROBS, GenerateRequest, SamplingParams

FIELDS = {"prompt": "input", "messages": "input"}


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """A question's prompt and labels, as tokens."""

    prompt_ids: Tokens
    tree: LabelTree


@dataclass(frozen=True, slots=True)
class _Node:
    """One engine request: what follows a beginning of a question's labels."""

    question: int
    start: Tokens
    request: GenerateRequest


@dataclass(slots=True)
class Scores:
    """What the engine said, of each question by beginning and next token.

    Token counts are those of the questions' prompts, each once.
    """

    logprobs: list[dict[tuple[Tokens, int], float]]
    input_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class QuestionEncoder:
    """Encodes the questions about one input; what they share is encoded once."""

    model: GenerationModel
    input_text: str
    _heads: dict[str, Tokens] = field(default_factory=dict)

    def encode(self, question: AskedQuestion) -> EncodedQuestion:
        """A question's prompt, which ends where a label is to follow, and its labels."""
        tokenizer = self.model.tokenizer
        head, marker, tail = self._render(question).rpartition(END_OF_INPUT)
        ids = self._heads.get(head)
        if ids is None:
            # A template writes what begins a text itself.
            ids = self._heads[head] = tuple(
                tokenizer.encode(head + marker, add_special_tokens=not tokenizer.has_chat_template)
            )
        prompt_ids = ids + continuation_ids(tokenizer, END_OF_INPUT, tail)
        return EncodedQuestion(prompt_ids, LabelTree.of(label_ids(tokenizer, question.labels)))

    def _render(self, question: AskedQuestion) -> str:
        content = f"{TASK}\n\n<input>\n{self.input_text}\n{END_OF_INPUT}{question.text}"
        tokenizer = self.model.tokenizer
        if not tokenizer.has_chat_template:
            return f"{content}\n\n{ANSWER}"
        kwargs = {**self.model.chat_template_kwargs, "enable_thinking": False}
        text = tokenizer.render_chat(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            template_kwargs=kwargs,
        )
        reasoning = self.model.reasoning_format
        if reasoning is not None and reasoning.is_open_after(text):
            text += f"\n{reasoning.end}\n\n"
        return text + ANSWER


def label_ids(tokenizer: Tokenizer, labels: Sequence[str]) -> list[Tokens]:
    """Each label's tokens, as they stand after ``ANSWER``."""
    return [continuation_ids(tokenizer, ANSWER, f" {label}") for label in labels]


async def score(
    engine: EngineClient,
    template: GenerateRequest,
    questions: Sequence[EncodedQuestion],
    *,
    max_waiting: int | None,
) -> Scores:
    """Ask the engine for the log-probability of every token of every label.

    The first question goes before the others, which then find the input in the prefix cache; what
    follows the first token of a label goes last, and finds the whole question there.

    Args:
        engine: where it is computed.
        template: whose model, client and further fields all requests have; its id begins theirs.
        questions: at least one.
        max_waiting: how many sequences the engine's queue holds, if that is known.

    Raises:
        ParallmError: a request was refused or failed.
    """
    nodes = _nodes(template, questions)
    input_tokens = sum(len(question.prompt_ids) for question in questions)
    scores = Scores([{} for _ in questions], input_tokens)
    roots = [node for node in nodes if not node.start]
    for part in (roots[:1], roots[1:], [node for node in nodes if node.start]):
        if part:
            await _run(engine, part, scores, max_waiting)
    return scores


def _nodes(template: GenerateRequest, questions: Sequence[EncodedQuestion]) -> list[_Node]:
    nodes = []
    for number, question in enumerate(questions):
        for start, ids in question.tree.branches.items():
            params = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                logprobs=0,
                logprobs_mode=RAW_LOGPROBS,
                logprob_token_ids=ids,
            )
            request = GenerateRequest(
                request_id=f"{template.request_id}-{len(nodes)}",
                model=template.model,
                prompt_ids=question.prompt_ids + start,
                params=params,
                priority=template.priority,
                client=template.client,
                cache_salt=template.cache_salt,
                group=template.request_id,
            )
            nodes.append(_Node(number, start, request))
    return nodes


async def _run(
    engine: EngineClient, nodes: Sequence[_Node], scores: Scores, max_waiting: int | None
) -> None:
    requests = [node.request for node in nodes]
    generation = await Generation.start(engine, requests, fields=FIELDS, max_waiting=max_waiting)
    try:
        async for number, event in generation.events():
            node = nodes[number]
            if isinstance(event, PromptEvent):
                scores.cached_tokens += 0 if node.start else event.num_cached_tokens
                continue
            if event.finish_reason == FinishReason.ABORT:
                raise RequestAbortedError("The request was aborted.")
            for entry in event.logprobs:
                known = scores.logprobs[node.question]
                known |= {(node.start, token): value for token, value in entry.top}
    finally:
        await generation.abort()
