"""The parser of a turn: which formats the model writes."""

from __future__ import annotations

from mlx_parallm.api.reasoning import ReasoningSplitter
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.parsing.parts import ContentText, Part, ReasoningText, TurnParser


class _Reasoning:
    """Reasoning between markers, and content."""

    def __init__(self, splitter: ReasoningSplitter) -> None:
        self._splitter = splitter

    @property
    def is_reasoning(self) -> bool:
        return self._splitter.is_reasoning

    def add(self, text: str) -> list[Part]:
        return _parts(self._splitter.add(text))

    def flush(self) -> list[Part]:
        return _parts(self._splitter.flush())


class _Content:
    """Nothing but content."""

    is_reasoning = False

    def add(self, text: str) -> list[Part]:
        return _parts(("", text))

    def flush(self) -> list[Part]:
        return []


def turn_parser(turn: TurnRequest, model: ServedModel, rendered: str) -> TurnParser:
    """A fresh parser; the template may have opened the reasoning."""
    markers = model.tokenizer.think_markers
    if markers is None or not turn.separate_reasoning:
        return _Content()
    start, end = markers
    return _Reasoning(ReasoningSplitter(start, end, is_open=rendered.rstrip().endswith(start)))


def _parts(texts: tuple[str, str]) -> list[Part]:
    reasoning, content = texts
    parts: list[Part] = [ReasoningText(reasoning)] if reasoning else []
    return [*parts, ContentText(content)] if content else parts
