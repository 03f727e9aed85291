"""All formats by name, and the detection of the one that a model writes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

from mlx_parallm.parsing.families import gemma, headed_json, json_array, muse, pythonic, xml_calls
from mlx_parallm.parsing.families.glm import GLM45
from mlx_parallm.parsing.families.harmony import HARMONY
from mlx_parallm.parsing.families.json_calls import HERMES, LLAMA3_JSON, LONGCAT
from mlx_parallm.parsing.families.kimi_k3 import KIMI_K3
from mlx_parallm.parsing.families.minimax_m3 import MINIMAX_M3
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.turn import REASONING_FORMATS
from mlx_parallm.types.errors import ConfigError

Form = TypeVar("Form", ToolFormat, ReasoningFormat)

# _TOOL_FORMATS: a model can show the signs of several formats, so formats with rarer signs come
# earlier.
_TOOL_FORMATS = (
    HARMONY,
    MINIMAX_M3,
    xml_calls.MINIMAX_M2,
    xml_calls.DEEPSEEK_V32,
    muse.MUSE_SPARK,
    xml_calls.SEED_OSS,
    xml_calls.MINICPM5,
    gemma.GEMMA4,
    gemma.FUNCTION_GEMMA,
    LONGCAT,
    GLM45,
    headed_json.KIMI_K2,
    KIMI_K3,
    headed_json.DEEPSEEK_V3,
    headed_json.DEEPSEEK_V31,
    json_array.COMMAND,
    headed_json.MISTRAL,
    headed_json.MISTRAL_JSON,
    pythonic.LFM2,
    pythonic.LLAMA4_PYTHONIC,
    pythonic.OLMO3,
    json_array.NEMOTRON,
    json_array.JAMBA,
    json_array.PHI4_MINI,
    json_array.GRANITE,
    xml_calls.QWEN3_CODER,
    HERMES,
    pythonic.PYTHONIC,
    LLAMA3_JSON,
    json_array.JSON_ARRAY,
)
_TOOL_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "qwen3": "hermes",
    "ernie45": "hermes",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
    "deepseek_v4": "deepseek_v32",
    "hunyuan_a13b": "jamba",
    "gptoss": "openai",
    "muse": "muse_spark",
    "muse_glimmer": "muse_spark",
}
_THINK_ALIASES = (
    "qwen3",
    "glm45",
    "glm47",
    "minimax_m2",
    "deepseek_v3",
    "nemotron_v3",
    "ernie45",
    "step3",
)
_REASONING_ALIASES = {
    **dict.fromkeys(_THINK_ALIASES, "deepseek_r1"),
    "muse": "muse_spark",
    "muse_glimmer": "muse_spark",
}


def tool_format_names() -> tuple[str, ...]:
    """Return the names that ``tool_format`` knows."""
    return _names(_TOOL_FORMATS, _TOOL_ALIASES)


def reasoning_format_names() -> tuple[str, ...]:
    """Return the names that ``reasoning_format`` knows."""
    return _names(REASONING_FORMATS, _REASONING_ALIASES)


def tool_format(name: str) -> ToolFormat:
    """Return the tool-call format of that name.

    Raises:
        ConfigError: no format has that name.
    """
    return _named(name, _TOOL_FORMATS, _TOOL_ALIASES, "tool-call")


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the reasoning format of that name.

    Raises:
        ConfigError: no format has that name.
    """
    return _named(name, REASONING_FORMATS, _REASONING_ALIASES, "reasoning")


def _named(name: str, forms: Sequence[Form], aliases: Mapping[str, str], kind: str) -> Form:
    for form in forms:
        if form.name == aliases.get(name, name):
            return form
    names = ", ".join(_names(forms, aliases))
    raise ConfigError(f"There is no {kind} parser {name!r}; known are {names}.")


def _names(forms: Sequence[Form], aliases: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted([*(form.name for form in forms), *aliases]))


def detect_tool_format(chat_template: str | None, tokens: Container[str]) -> ToolFormat | None:
    """Return the format of a model's tool calls, from its chat template and its vocabulary."""
    matching = (form for form in _TOOL_FORMATS if form.detect(chat_template or "", tokens))
    return next(matching, None)


def detect_reasoning_format(
    chat_template: str | None, tokens: Container[str]
) -> ReasoningFormat | None:
    """Return the format of a model's reasoning, from its chat template and its vocabulary."""
    matching = (form for form in REASONING_FORMATS if form.detect(chat_template or "", tokens))
    return next(matching, None)
