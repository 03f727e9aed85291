"""From questions to engine requests, and from their log-probabilities to probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlx_parallm.api.decisions.request import ANSWER, END_OF_INPUT, TASK, AskedQuestion
from mlx_parallm.api.turns.continuation import continuation_ids
from mlx_parallm.api.turns.known_tokens import known_tokens, label_request
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.generation.model import GenerationModel, Tokenizer
from mlx_parallm.types.request import GenerateRequest

Tokens = tuple[int, ...]
FIELDS = {"prompt": "input", "messages": "input"}
# The log-probability of each next token after each beginning of a question's labels.
Logprobs = dict[tuple[Tokens, int], float]


@dataclass(frozen=True, slots=True)
class LabelTree:
    """The labels' tokens as a tree: labels that begin alike share what they begin with.

    Attributes:
        labels: the tokens of each.
        branches: what may follow each beginning of a label; the empty one comes first.
    """

    labels: tuple[Tokens, ...]
    branches: Mapping[Tokens, Tokens]

    @staticmethod
    def of(labels: Sequence[Tokens]) -> LabelTree:
        """Return the tree of these labels, none of which begins another."""
        branches: dict[Tokens, dict[int, None]] = {}
        for label in labels:
            for place, token in enumerate(label):
                branches.setdefault(label[:place], {})[token] = None
        return LabelTree(tuple(labels), {start: tuple(ids) for start, ids in branches.items()})

    def probabilities(self, logprobs: Mapping[tuple[Tokens, int], float]) -> list[float]:
        """Each label's share, from the log-probability of each token after its beginning."""
        totals = [
            sum(logprobs[label[:place], token] for place, token in enumerate(label))
            for label in self.labels
        ]
        best = max(totals)
        weights = [math.exp(total - best) for total in totals]
        whole = sum(weights)
        return [weight / whole for weight in weights]


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """A question's prompt and labels, as tokens.

    Attributes:
        prompt_ids: the prompt.
        num_shared: tokens of the prompt before the question.
        tree: the labels.
    """

    prompt_ids: Tokens
    num_shared: int
    tree: LabelTree


@dataclass(frozen=True, slots=True)
class _Node:
    """One engine request: what follows a beginning of a question's labels."""

    question: int
    start: Tokens
    request: GenerateRequest


@dataclass(slots=True)
class QuestionEncoder:
    """Encodes the questions about one input; what they share is encoded once."""

    model: GenerationModel
    input_text: str
    _heads: dict[str, Tokens] = field(default_factory=dict[str, Tokens])

    def encode(self, question: AskedQuestion) -> EncodedQuestion:
        """Return a question's prompt, which ends where a label is to follow, and its labels."""
        tokenizer = self.model.tokenizer
        head, marker, tail = self._render(question).rpartition(END_OF_INPUT)
        ids = self._heads.get(head)
        if ids is None:
            # A template writes what begins a text itself.
            ids = self._heads[head] = tuple(
                tokenizer.encode(head + marker, add_special_tokens=not tokenizer.has_chat_template)
            )
        prompt_ids = ids + continuation_ids(tokenizer, END_OF_INPUT, tail)
        labels = LabelTree.of(label_ids(tokenizer, question.labels))
        return EncodedQuestion(prompt_ids, len(ids), labels)

    def _render(self, question: AskedQuestion) -> str:
        content = f"{TASK}\n\n<input>\n{self.input_text}\n{END_OF_INPUT}{question.text}"
        tokenizer = self.model.tokenizer
        if not tokenizer.has_chat_template:
            return f"{content}\n\n{ANSWER}"
        kwargs = self.model.template_variables({"enable_thinking": False})
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
    admitted: Admitted, template: GenerateRequest, questions: Sequence[EncodedQuestion]
) -> tuple[list[Logprobs], int]:
    """Return the log-probabilities of every question's labels, and how many tokens were cached.

    The first question goes before the others, which then find the input in the prefix cache; what
    follows the first token of a label goes last, and finds the whole question there.

    Args:
        admitted: where it is computed.
        template: whose model, client and further fields all requests have; its id begins theirs.
        questions: at least one.

    Raises:
        ParallmError: a request was refused or failed.
    """
    nodes = _nodes(template, questions)
    roots = [number for number, node in enumerate(nodes) if not node.start]
    branches = [number for number, node in enumerate(nodes) if node.start]
    requests = [node.request for node in nodes]
    results = await known_tokens(admitted, requests, (roots[:1], roots[1:], branches), FIELDS)
    logprobs: list[Logprobs] = [{} for _ in questions]
    cached_tokens = 0
    for node, known in zip(nodes, results, strict=True):
        cached_tokens += 0 if node.start else known.cached_tokens
        logprobs[node.question] |= {(node.start, token): value for token, value in known.labels}
    return logprobs, cached_tokens


def _nodes(template: GenerateRequest, questions: Sequence[EncodedQuestion]) -> list[_Node]:
    nodes: list[_Node] = []
    for number, question in enumerate(questions):
        for start, ids in question.tree.branches.items():
            request = label_request(
                template,
                len(nodes),
                question.prompt_ids + start,
                ids,
                num_shared=question.num_shared,
            )
            nodes.append(_Node(number, start, request))
    return nodes
