"""The pipelines that golden answers are written for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Call = tuple[Any, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PipelineCase:
    """A pipeline, and what it is called with.

    Attributes:
        task: Hugging Face's name of it.
        encoder: a file of tests/golden/encoders.
        config: fields that are other than there.
        calls: inputs and parameters.
    """

    task: str
    encoder: str
    calls: list[Call]
    config: dict[str, Any] = field(default_factory=dict)


def fill_mask_calls(mask: str) -> list[Call]:
    """One mask and several; targets that are tokens, are none, are the same; several texts."""
    one = f"the cat is {mask} in paris."
    return [
        (one, {}),
        (one, {"top_k": 3}),
        (f"{mask} is good", {"top_k": 2}),
        (f"the {mask} is {mask} , it was good", {"top_k": 2}),
        (one, {"targets": ["good", "happy", " cat", "happiness", "good"]}),
        (one, {"targets": ["cat", "walking", "dogs"], "top_k": 2}),
        (f"a {mask} in the {mask}", {"targets": ["a", "good"]}),
        ([one, f"my {mask}"], {"top_k": 1}),
        ([one], {"top_k": 1}),
    ]


CASES = [
    PipelineCase("fill-mask", "bert_masked_lm", fill_mask_calls("[MASK]")),
    PipelineCase("fill-mask", "roberta_masked_lm", fill_mask_calls("<mask>")),
    PipelineCase("fill-mask", "xlm_roberta_masked_lm", fill_mask_calls("<mask>")),
    PipelineCase("fill-mask", "modernbert_masked_lm", fill_mask_calls("<mask>")),
]
