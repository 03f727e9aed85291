"""The prompt, constraints and parameters of a turn, with the embedded tokenizer."""

from __future__ import annotations

import functools
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.api.chat.request import chat_tools
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.tools import ToolChoice, ToolMode
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.parts import ContentText
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import SamplingParams
from tests.fakes import make_info

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "sub", "parameters": SCHEMA, "strict": True}}
REQUIRED = ToolChoice(mode=ToolMode.REQUIRED)
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
TEXTUAL = "no tools {% for m in messages %}{{ m.content }}{% endfor %}"


@functools.cache
def demo(template: str | None = None) -> GenerationModel:
    tokenizer = load_tokenizer(DEMO_FOLDER, chat_template=template)
    size = tokenizer.vocab_size
    vocabulary = GrammarVocabulary(tokenizer.backend_json, tokenizer.eos_ids, size, size)
    return GenerationModel(
        names=("demo",),
        root="demo",
        created=0,
        tokenizer=tokenizer,
        info=make_info(),
        grammars=GrammarCompiler(vocabulary),
        tool_format=registry.tool_format("hermes"),
        reasoning_format=registry.reasoning_format("deepseek_r1"),
    )


async def prepare(
    *tools: dict[str, Any], model: GenerationModel | None = None, **more: Any
) -> PreparedTurn:
    fields = {"request_id": "r", "messages": HI, "tools": chat_tools(tools)} | more
    return await prepare_turn(TurnRequest(**fields), model or demo())


def accepts(prepared: PreparedTurn, text: str) -> bool:
    """True if the whole text without reasoning matches the turn's grammar."""
    compiler, grammar = prepared.model.grammars, prepared.request.params.grammar
    assert isinstance(compiler, GrammarCompiler)
    assert grammar is not None
    matcher = compiler.matcher(grammar.text)
    ids = prepared.model.tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


async def test_without_tools_or_structure_nothing_is_constrained() -> None:
    prepared = await prepare()
    assert prepared.request.params == SamplingParams()
    assert prepared.tool_format is None
    assert "<|im_start|>assistant" in prepared.rendered
    assert (await prepare(ADD)).request.params.grammar is None


async def test_a_forced_call_is_a_call_and_nothing_else() -> None:
    prepared = await prepare(ADD, STRICT, tool_choice=REQUIRED)
    assert accepts(prepared, CALL)
    assert accepts(prepared, f"{CALL}\n{CALL}")
    for bad in ("hello", "", CALL.replace("1", '"x"'), CALL.replace("add", "other"), CALL + " and"):
        assert not accepts(prepared, bad)
    once = await prepare(ADD, STRICT, tool_choice=REQUIRED, parallel_tool_calls=False)
    assert accepts(once, CALL)
    assert not accepts(once, f"{CALL}\n{CALL}")
    named = await prepare(ADD, STRICT, tool_choice=ToolChoice.named("sub"))
    assert not accepts(named, CALL)
    assert accepts(named, CALL.replace("add", "sub"))
    # The prompt is the same whatever is forced.
    assert named.rendered == prepared.rendered
    assert '"add"' in named.rendered


@pytest.mark.parametrize(
    ("more", "start"),
    [
        ({}, None),
        ({"template_kwargs": {"reasoning_effort": "none"}}, None),
        ({"template_kwargs": {"reasoning_effort": "low"}}, "<think>"),
        ({"template_kwargs": {"enable_thinking": True}}, "<think>"),
    ],
)
async def test_reasoning_before_a_forced_call_is_for_those_who_ask(
    more: dict[str, Any], start: str | None
) -> None:
    grammar = (await prepare(ADD, tool_choice=REQUIRED, **more)).request.params.grammar
    assert grammar is not None
    assert grammar.free_starts == ((start,) if start else ())
    assert grammar.begins_after == (start and "</think>")


async def test_reasoning_that_the_prompt_opens_comes_before_a_forced_call() -> None:
    opening = demo(TEXTUAL + "{{ tools }}<think>\n")
    grammar = (await prepare(ADD, model=opening, tool_choice=REQUIRED)).request.params.grammar
    assert grammar is not None
    assert (grammar.begins_after, grammar.free_starts) == ("</think>", ())


async def test_tools_that_the_model_would_not_see_are_refused_unless_forced() -> None:
    blind = demo(TEXTUAL)
    with pytest.raises(InvalidRequestError) as refusal:
        await prepare(ADD, model=blind)
    assert refusal.value.param == "tools"
    assert accepts(await prepare(ADD, model=blind, tool_choice=REQUIRED), CALL)
    none = ToolChoice(mode=ToolMode.NONE)
    assert (await prepare(ADD, model=blind, tool_choice=none)).tool_format is None


async def test_who_reads_calls_from_tokens_has_the_tools_in_the_prompt() -> None:
    none = ToolChoice(mode=ToolMode.NONE)
    shown, untold = [
        await prepare(ADD, tool_choice=none, parses_calls=parses) for parses in (True, False)
    ]
    assert shown.rendered != untold.rendered
    assert shown.rendered == (await prepare(ADD)).rendered
    assert shown.tool_format is None


async def test_calls_that_nobody_could_read_are_refused_unless_that_is_wanted() -> None:
    unknown = replace(demo(), tool_format=None)
    with pytest.raises(InvalidRequestError, match="tool-call-parser"):
        await prepare(ADD, model=unknown)
    left = await prepare(ADD, model=replace(unknown, parses_tools=False))
    assert left.tool_format is None
    forced = await prepare(ADD, model=unknown, tool_choice=REQUIRED, parallel_tool_calls=False)
    assert accepts(forced, '[{"name": "add", "parameters": {"n": 1}}]')


async def test_a_server_may_forbid_that_models_choose() -> None:
    model = replace(demo(), allows_auto_tools=False)
    with pytest.raises(InvalidRequestError) as refusal:
        await prepare(ADD, model=model)
    assert refusal.value.param == "tool_choice"
    await prepare(ADD, model=model, tool_choice=REQUIRED)


async def test_strict_tools_are_called_as_their_schemas_say() -> None:
    prepared = await prepare(ADD, STRICT)
    sub = CALL.replace("add", "sub")
    assert accepts(prepared, "just text < here")
    assert accepts(prepared, f"Let me see. {sub}\n{CALL} done")
    assert not accepts(prepared, sub.replace("1", '"x"'))
    assert not accepts(prepared, sub.replace('"n"', '"m"'))
    assert not accepts(prepared, sub.replace("sub", "other"))


async def test_strict_tools_are_enforced_in_harmony() -> None:
    model = replace(
        demo("{{ tools }}<|channel|><|message|><|start|>assistant"),
        tool_format=registry.tool_format("openai"),
        reasoning_format=registry.reasoning_format("openai_gptoss"),
    )
    prepared = await prepare(STRICT, model=model)
    call = "<|channel|>commentary to=functions.sub <|constrain|>json<|message|>"
    assert accepts(prepared, call + '{"n": 1}')
    assert not accepts(prepared, call + '{"n": "x"}')


STRUCTURES = [
    (specs.json_schema(SCHEMA), '{"n": 5}', '{"n": "x"}'),
    (specs.json_schema(SCHEMA, strict=False), '{"n": 5}', '{"n": "x"}'),
    (specs.regex("a+b"), "aab", "b"),
    (specs.choice(["yes", "no"]), "no", "maybe"),
    (specs.context_free('start: "x" "y"*'), "xyy", "yx"),
    (specs.context_free('root ::= "x" "y"*'), "xyy", "yx"),
    (specs.structural_tag({"format": {"type": "const_string", "value": "k"}}), "k", "kk"),
]


@pytest.mark.parametrize(("spec", "good", "bad"), STRUCTURES)
async def test_with_a_structure_and_tools_the_answer_is_one_of_both(
    spec: specs.GrammarSpec, good: str, bad: str
) -> None:
    alone = await prepare(structure=spec)
    assert accepts(alone, good)
    assert not accepts(alone, CALL)
    both = await prepare(ADD, structure=spec)
    assert accepts(both, good)
    assert accepts(both, CALL)
    for prepared in (alone, both):
        assert not accepts(prepared, bad)


async def test_what_a_model_cannot_combine_is_refused() -> None:
    tool_format = demo().tool_format
    unforced = replace(tool_format, forced=None) if tool_format else None
    model = replace(demo(), tool_format=unforced)
    with pytest.raises(InvalidRequestError) as refusal:
        await prepare(ADD, model=model, structure=specs.json_object(), structure_field="ebnf")
    assert refusal.value.param == "ebnf"


async def test_a_schema_that_cannot_be_enforced_is_named() -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"format": "date"}}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    for choice in (REQUIRED, ToolChoice()):
        with pytest.raises(InvalidRequestError) as refusal:
            await prepare({"type": "function", "function": function}, tool_choice=choice)
        assert refusal.value.param == "tools"
    lenient = {"type": "function", "function": function | {"strict": False}}
    assert (await prepare(lenient, tool_choice=REQUIRED)).request.params.grammar is not None


async def test_a_budget_knows_the_markers() -> None:
    tokenizer = demo().tokenizer
    budget = (await prepare(thinking_budget=5)).request.params.thinking_budget
    assert budget is not None
    assert (budget.tokens, budget.is_open) == (5, False)
    assert budget.end_id == tokenizer.token_id("</think>")
    assert budget.start_id == tokenizer.token_id("<think>")
    opened = await prepare(thinking_budget=5, model=demo(TEXTUAL + "<think>\n"))
    assert opened.request.params.thinking_budget == replace(budget, is_open=True)
    silent = replace(demo(), reasoning_format=None)
    assert (await prepare(thinking_budget=5, model=silent)).request.params.thinking_budget is None


async def test_markers_that_are_special_tokens_stay_in_the_text() -> None:
    form = demo().tool_format
    assert form is not None
    special = replace(form, markers=("<|im_start|>",), stop_texts=("<tool_response>", "no token"))
    model = replace(demo(), tool_format=special)
    prepared = await prepare(ADD, model=model, params=SamplingParams(stop_token_ids=(7,)))
    start = demo().tokenizer.token_id("<|im_start|>")
    assert prepared.request.params.skip_special_tokens
    assert prepared.request.params.shown_token_ids == (start,)
    stop = demo().tokenizer.token_id("<tool_response>")
    assert prepared.request.params.stop_token_ids == (7, stop)
    assert (await prepare(model=model)).request.params.shown_token_ids == ()


async def test_silent_markers_that_are_tokens_are_left_out() -> None:
    form = demo().tool_format
    assert form is not None
    silent = ("<tool_response>", "no token")
    model = replace(demo(), tool_format=replace(form, silent=silent))
    prepared = await prepare(ADD, model=model)
    left_out = demo().tokenizer.token_id("<tool_response>")
    assert prepared.request.params.hidden_token_ids == (left_out,)
    # A text that looks like such a token is content.
    parser = prepared.parsers()[0]
    parts = [*parser.add("no token<tool_response>a"), *parser.flush()]
    assert "".join(getattr(part, "text", "") for part in parts) == "<tool_response>a"


async def test_variables_of_the_server_come_before_those_of_the_request() -> None:
    model = replace(demo(), chat_template_kwargs={"enable_thinking": False})
    assert (await prepare(model=model)).rendered.endswith("</think>\n\n")
    prepared = await prepare(model=model, template_kwargs={"enable_thinking": True})
    assert not prepared.rendered.endswith("</think>\n\n")


async def test_history_is_rendered_with_its_calls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"n":1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    rendered = (await prepare(ADD, messages=messages)).rendered
    assert CALL in rendered
    assert "<tool_response>\n2\n</tool_response>" in rendered
    assert json.dumps(SCHEMA["required"]) in rendered


async def test_mistrals_template_takes_the_ids_that_a_turn_before_was_given() -> None:
    template = (
        "[TOOL_CALLS]{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9"
        " %}{{ raise_exception('no') }}{% endif %}{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call = {"id": f"call_{'0' * 24}", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "2"},
    ]
    tokenizer = demo(template).tokenizer
    form = registry.detect_tool_format(template, {})
    model = replace(demo(template), tool_format=form, tokenizer=tokenizer)
    prepared = await prepare(model=model, messages=messages)
    calls = prepared.rendered.removeprefix("[TOOL_CALLS]")
    assert calls[:9] == calls[9:]


@pytest.mark.parametrize(("begun", "is_open"), [("<think>\nSo", True), ("It", False)])
async def test_an_answer_may_go_on_within_reasoning_that_was_begun(
    begun: str, is_open: bool
) -> None:
    prepared = await prepare(
        messages=[*HI, {"role": "assistant", "content": begun}],
        continue_final_message=True,
        add_generation_prompt=False,
        structure=specs.json_object(),
    )
    assert prepared.rendered.endswith(begun)
    (parser,) = prepared.parsers()
    parts = [*parser.add("a</think>b" if is_open else "b"), *parser.flush()]
    content = "".join(part.text for part in parts if isinstance(part, ContentText))
    assert content == "b"
    grammar = prepared.request.params.grammar
    assert grammar is not None
    assert (grammar.begins_after == "</think>" and not grammar.free_starts) == is_open
    form = registry.reasoning_format("deepseek_r1")
    assert not form.is_open_after("", "<think>So</think>It")


@pytest.mark.parametrize("where", ["content", "tools", "calls"])
@pytest.mark.parametrize("size", [100, 20_000])
async def test_what_is_long_is_rendered_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, where: str, size: int
) -> None:
    model, threads, text = demo(), [], "x" * size
    render = model.tokenizer.render_chat

    def noting(*arguments: Any, **more: Any) -> str:
        rendered = render(*arguments, **more)
        if text in rendered:
            threads.append(threading.current_thread())
        return rendered

    monkeypatch.setattr(model.tokenizer, "render_chat", noting)
    tool = {"type": "function", "function": {"name": "t", "description": text}}
    call = {"id": "a", "type": "function", "function": {"name": "t", "arguments": f'"{text}"'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if where == "calls":
        messages = [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ]
    await (prepare(tool) if where == "tools" else prepare(messages=messages))
    assert (threads == [threading.main_thread()]) is (size == 100)
