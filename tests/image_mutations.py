"""Mistakes that a server could make with images, as patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.dense import TwoWaySpan
from mlx_parallm.worker.generation.inputs.rotary_rows import RotarySeam
from mlx_parallm.worker.generation.inputs.rows import InputFeatures
from tests.golden_images import vision_names

Mutation = Callable[[pytest.MonkeyPatch], None]


def no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(self: InputFeatures, sequences: Sequence[ScheduledSequence]) -> mx.array | None:
        rows = gather(self, sequences)
        return None if rows is None else mx.zeros_like(rows)

    gather = InputFeatures.gather
    monkeypatch.setattr(InputFeatures, "gather", zeros)


def other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_rows(
        self: InputFeatures, slot: int, run: Any, rows: mx.array, *more: Any, **options: Any
    ) -> None:
        put(self, slot, run, rows[::-1], *more, **options)

    put = InputFeatures.put
    monkeypatch.setattr(InputFeatures, "put", reversed_rows)


def plain_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotarySeam, "positions", lambda *_: None)


def plain_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptInputs, "rope_offsets", lambda *_: ())


def causal_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputFeatures, "two_way_spans", lambda *_: [])


def other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(self: InputFeatures, sequences: Sequence[ScheduledSequence]) -> list[TwoWaySpan]:
        return [replace(span, two_way=others[span.two_way]) for span in spans(self, sequences)]

    spans = InputFeatures.two_way_spans
    others = dict(zip(TwoWay, reversed(TwoWay), strict=True))
    monkeypatch.setattr(InputFeatures, "two_way_spans", exchanged)


def cut_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptInputs, "cut", lambda self, start, stop: stop)


def no_deepstack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputFeatures, "gather_layers", lambda *_: None)


TWO_WAY = ("gemma3", "gemma4", "gemma4_moe")
M_ROPE = tuple(name for name in vision_names() if name.startswith("qwen"))
DEEPSTACK = tuple(name for name in vision_names() if name.startswith("qwen3_vl"))
#: ``LOADED_MUTATIONS``: golden models, and mistakes of the worker with them.
LOADED_MUTATIONS: list[tuple[str, Mutation]] = [
    *((name, mutation) for name in TWO_WAY for mutation in (causal_spans, other_layers)),
    *((name, mutation) for name in vision_names() for mutation in (no_features, other_images)),
    *((name, plain_positions) for name in M_ROPE),
    *((name, no_deepstack) for name in DEEPSTACK),
]
#: ``SCHEDULED_MUTATIONS``: golden models, and mistakes of the scheduler with them.
SCHEDULED_MUTATIONS: list[tuple[str, Mutation]] = [
    *((name, cut_spans) for name in TWO_WAY),
    *((name, plain_offsets) for name in M_ROPE),
]
