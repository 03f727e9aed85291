"""Parsers of reasoning at the beginning of a turn, between two markers."""

from __future__ import annotations

import re
from collections.abc import Container

from mlx_parallm.parsing.families.harmony import HARMONY_REASONING
from mlx_parallm.parsing.families.kimi_k3 import ANSWER as KIMI_K3_ANSWER
from mlx_parallm.parsing.families.kimi_k3 import KIMI_K3
from mlx_parallm.parsing.families.muse import MUSE_REASONING
from mlx_parallm.parsing.formats import ReadContext, ReasoningFormat
from mlx_parallm.parsing.reader import Steps


def read_reasoning(context: ReadContext, form: ReasoningFormat) -> Steps[None]:
    """Read the reasoning, if the text begins with it or begins inside it."""
    reader, writer = context.reader, context.writer
    writer.is_reasoning = context.is_open
    yield from reader.skip_space()
    if (yield from reader.accept(form.start)):
        writer.is_reasoning = True
    elif not context.is_open:
        reader.rewind()
        return
    writer.marker()
    end = yield from reader.pass_until((form.end, *form.also_ends), writer.reasoning)
    if end is None:
        return
    if end == form.end:
        reader.take(len(end))
    writer.marker()
    writer.is_reasoning = False


def _format(
    name: str,
    start: str,
    end: str,
    *,
    sign: str = "",
    also_ends: tuple[str, ...] = (),
    silent: tuple[str, ...] = (),
) -> ReasoningFormat:
    def detect(template: str, tokens: Container[str]) -> bool:
        return (end in template or (start in tokens and end in tokens)) and sign in template

    return ReasoningFormat(name, start, end, detect, also_ends, silent)


THINK = _format("deepseek_r1", "<think>", "</think>")
_HUNYUAN = re.compile(r"<answer>|<\|extra_0\|>")
_KIMI_SECTION = "<|tool_calls_section_begin|>"

# REASONING_FORMATS: the order matters, because a model can show the signs of several formats.
REASONING_FORMATS = (
    HARMONY_REASONING,
    MUSE_REASONING,
    _format("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        KIMI_K3.detect,
        silent=KIMI_K3.silent,
        answer_start=KIMI_K3_ANSWER,
    ),
    _format("mistral", "[THINK]", "[/THINK]"),
    _format("seed_oss", "<seed:think>", "</seed:think>"),
    _format("longcat", "<longcat_think>", "</longcat_think>"),
    _format("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>"),
    _format("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat(
        "hunyuan_a13b",
        "<think>",
        "</think>",
        lambda template, _: "</think>" in template and bool(_HUNYUAN.search(template)),
        silent=("<answer>", "</answer>"),
    ),
    _format("kimi_k2", "<think>", "</think>", sign=_KIMI_SECTION, also_ends=(_KIMI_SECTION,)),
    THINK,
)
