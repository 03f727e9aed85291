"""vLLM's tests of its tool parsers, over this server's parsers in vLLM's interface."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlx_parallm.peers import child_process
from tests.corpus.fetch import unpacked
from tests.corpus.sources import VLLM
from tests.corpus.suites import ROOT

#: Tests of vLLM's own parts: its registry, its grammars, its helpers, its tokenizers.
OWN = re.compile(
    r"adjust_request|AdjustRequest|registered|regex_timeout|structural_tag|ParseGemma4|skip_special"
    r"|TestParseArguments|TestBufferDeltaText|uses_shared|namespace|skips_structured|native_syntax"
    r"|required_prefers"
)
SPACE = "white space beside a call is kept"
AFTER = "text after calls is left out"
WRAPPED = "arguments in an object of their own are taken out of it"
#: By module, the tests that expect something else, and what.
OTHERWISE: dict[str, dict[str, str]] = {
    "deepseekv31": {"multiple_tools": AFTER},
    "deepseekv32": {
        "content_before|delimiter_preserved_fast": SPACE,
        "wrapper_repaired": WRAPPED,
        "number_param": "5.0 is an integer where a number is allowed",
    },
    "deepseekv4": {
        "test_extract_tool_calls$": SPACE,
        "function_calls_wrapper": "the tag of V3.2's sections is content",
        "arguments_wrapper": WRAPPED,
    },
    "gemma4": {
        "incomplete_tool_call": "arguments that are cut off are completed",
        "alformed": "a call without a brace has its text as its name",
        "three_mixed": "a call without a brace has its text as its name",
    },
    "glm4_moe": {"glm45_newline": "the test reads vLLM's request"},
    "glm47_moe": {"TestGlm47Streaming": "the tests read vLLM's deltas by token"},
    "granite4": {"complex": "the test cuts its text by a model's tokenizer"},
    "hermes": {"invalid_json": "invalid arguments make no call"},
    "hunyuan_a13b": {"parser_extract|parser_streaming": "the tests compare ids"},
    "jamba": {"streaming": SPACE},
    "kimi_k2": {
        "test_extract_tool_calls.test_extract|test_extract_tool_calls\\[": SPACE,
        "invalid_funcall_id": "a name without an index is none",
        "noise_between": "text between markers is left out",
        "content_after": AFTER,
    },
    "lfm2": {
        "set_arg|nested_python|leading_zero": "more of Python's notation is read",
        "echoed": AFTER,
    },
    "llama3_json": {
        "simple|surrounding": "a call may stand anywhere in the text",
        "invalid_json|missing_parameters": "an object without arguments makes no call",
    },
    "minicpm5xml": {
        "surrounding_text|interleaved": AFTER,
        "space_marker|collapsed|sentencepiece": "spaces that a tokenizer lost are put back",
        "invalid|unknown_tool|incomplete_missing": "calls that do not fit their tool are none",
        "wrapped": WRAPPED,
        "extra_arguments": "arguments that no tool has are left out",
        "alias": "names that models mix up are replaced",
    },
    "minimax_m2": {"content_before": SPACE, "ParameterWhitespace": SPACE},
    "minimax_m3": {"nested_tool_call": SPACE},
    "qwen3coder": {"ParameterWhitespace": SPACE},
    "step3p5": {
        "streaming_incremental": "a name and its arguments come in two deltas",
        "mixed_content": AFTER,
    },
}
MODULES = (
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "deepseekv4",
    "ernie45_moe",
    "functiongemma",
    "gemma4",
    "glm47_moe",
    "glm4_moe",
    "granite",
    "granite4",
    "hermes",
    "hunyuan_a13b",
    "jamba",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "llama4_pythonic",
    "longcat",
    "minicpm5xml",
    "minimax_m2",
    "minimax_m3",
    "olmo3",
    "phi4mini",
    "pythonic",
    "qwen3coder",
    "step3p5",
)
SAMPLE = ("hermes", "minimax_m3", "qwen3coder")


def run(module: str, results: Path) -> dict[str, bool]:
    """Run a module's tests; return which passed, by name."""
    folder = unpacked(VLLM)
    (results / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    file = results / "results.xml"
    command = [
        *(sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "tests.corpus.vllm_stand_in"),
        *("-c", str(results / "pytest.ini"), "--rootdir", str(folder), "-p", "no:cacheprovider"),
        *("--import-mode=importlib", "-p", "no:schemathesis", f"--junit-xml={file}"),
        str(folder / "tests" / "tool_parsers" / f"test_{module}_tool_parser.py"),
    ]
    paths = os.pathsep.join([str(ROOT), str(folder)])
    child_process.run(
        [child_process.COMMAND, *command], cwd=results, env=os.environ | {"PYTHONPATH": paths}
    )
    cases = ElementTree.parse(file).iter("testcase")
    return {
        f"{case.get('classname')}.{case.get('name')}": case.find("failure") is None
        and case.find("error") is None
        for case in cases
    }


def reason(module: str, name: str) -> str | None:
    """Return why a test may fail; None: it must pass."""
    if OWN.search(name):
        return "of vLLM's own parts"
    patterns = OTHERWISE.get(module, {})
    return next((why for pattern, why in patterns.items() if re.search(pattern, name)), None)


@pytest.mark.parametrize(
    "module",
    [pytest.param(m, marks=(pytest.mark.sample,) if m in SAMPLE else ()) for m in MODULES],
)
def test_module(module: str, tmp_path: Path, record_property: Any) -> None:
    results = run(module, tmp_path)
    assert len(results) > 1
    failed = [name for name, passed in results.items() if not passed]
    assert [name for name in failed if reason(module, name) is None] == []
    others = sum(OWN.search(name) is None for name in failed)
    record_property("case", f"{module}: {len(results) - len(failed)} of {len(results)} tests")
    record_property("outcome", "otherwise, on purpose" if others else "the same")
