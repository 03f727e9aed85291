"""The pipelines with golden answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Call = tuple[Any, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PipelineCase:
    """A pipeline and the calls of it.

    Attributes:
        task: Hugging Face's name of the pipeline.
        encoder: a file of tests/golden/encoders.
        config: changes to that file's config.
        calls: inputs and parameters of the calls.
    """

    task: str
    encoder: str
    calls: list[Call]
    config: dict[str, Any] = field(default_factory=dict)


def fill_mask_calls(mask: str) -> list[Call]:
    """Return calls with one and several masks, various targets, and several texts."""
    text = f"the cat is {mask} in paris."
    return [
        (text, {}),
        (text, {"top_k": 3}),
        (f"{mask} is good", {"top_k": 2}),
        (f"the {mask} is {mask} , it was good", {"top_k": 2}),
        (text, {"targets": ["good", "happy", " cat", "happiness", "good"]}),
        (text, {"targets": ["cat", "walking", "dogs"], "top_k": 2}),
        (f"a {mask} in the {mask}", {"targets": ["a", "good"]}),
        ([text, f"my {mask}"], {"top_k": 1}),
        ([text], {"top_k": 1}),
    ]


def classification_calls() -> list[Call]:
    """Return calls with texts and a pair, by every function; lists give lists of labels."""
    texts = ["the movie was very good!", "it is bad"]
    pair = {"text": "the cat is happy", "text_pair": "the dog is sad"}
    return [
        (texts, {"top_k": None}),
        (texts, {"top_k": 2}),
        (texts, {"top_k": None, "function_to_apply": "sigmoid"}),
        (texts, {"top_k": None, "function_to_apply": "softmax"}),
        (texts, {"top_k": None, "function_to_apply": "none"}),
        ([pair], {"top_k": None}),
    ]


def token_calls() -> list[Call]:
    """Return calls with words of one and several tokens, by every strategy, and several texts."""
    text = "Anna loves walking dogs, Paris."
    strategies = ["none", "simple", "first", "average", "max"]
    return [
        *((text, {"aggregation_strategy": strategy}) for strategy in strategies),
        *(
            (text, {"aggregation_strategy": strategy, "ignore_labels": []})
            for strategy in strategies
        ),
        (["tom reads", "a é house"], {"aggregation_strategy": "none", "ignore_labels": ["B-PER"]}),
    ]


def labels(*names: str) -> dict[str, Any]:
    """Return the fields of a config that name labels."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


PERSONS = labels("O", "B-PER", "I-PER")
CASES = [
    PipelineCase("fill-mask", "bert_masked_lm", fill_mask_calls("[MASK]")),
    PipelineCase("fill-mask", "roberta_masked_lm", fill_mask_calls("<mask>")),
    PipelineCase("fill-mask", "xlm_roberta_masked_lm", fill_mask_calls("<mask>")),
    PipelineCase("fill-mask", "modernbert_masked_lm", fill_mask_calls("<mask>")),
    PipelineCase("text-classification", "bert_sequence", classification_calls()),
    PipelineCase(
        "text-classification",
        "roberta_sequence",
        classification_calls(),
        {"problem_type": "multi_label_classification"},
    ),
    PipelineCase(
        "text-classification",
        "xlm_roberta_sequence",
        classification_calls(),
        {"problem_type": "regression"},
    ),
    PipelineCase("token-classification", "bert_token", token_calls(), PERSONS),
    PipelineCase("token-classification", "roberta_token", token_calls(), PERSONS),
]
