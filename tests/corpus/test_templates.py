"""Every chat template in conversations of agents: nothing is lost, and nothing refused in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mlx_parallm.api.chat.request import chat_tools
from mlx_parallm.api.turns.fields import effort_kwargs
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.images.prompt import ImagePrompt, text_prompt
from mlx_parallm.template_time import at_one_time
from mlx_parallm.tokenizer.rewrites import developers_as_systems
from mlx_parallm.tokenizer.thinking import EFFORTS
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import InvalidRequestError
from tests.corpus.template_folder import templates, with_template

pytestmark = pytest.mark.sample

Message = dict[str, Any]
TEMPLATES = dict(templates())
PLACE = {"type": "string", "description": "Where."}
# VARIABLES: those without which a template cannot be used (firefunction's).
VARIABLES = {"functions": "[]", "datetime": "today"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": PLACE}},
    },
}


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def called(*ids: str, text: str = "", arguments: str = '{"place": "there-%s"}') -> Message:
    calls = [
        {
            "id": id_,
            "type": "function",
            "function": {"name": "look", "arguments": arguments.replace("%s", id_)},
        }
        for id_ in ids
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(id_: str) -> Message:
    return {"role": "tool", "tool_call_id": id_, "name": "look", "content": f"seen-{id_}"}


A, B = "aaaaaaaa1", "bbbbbbbb2"
ASKED = [said("system", "rule-one"), said("user", "ask-one")]
TALKED = [*ASKED, said("assistant", "say-one")]
LOOKED = [*ASKED, called(A), result(A)]
WORDS = ("rule-one", "ask-one", f"there-{A}", f"seen-{A}")
#: The conversation of a case, and what must be in its text.
CASES: dict[str, tuple[list[Message], tuple[str, ...]]] = {
    "system before a user": (
        [*TALKED, said("system", "rule-two"), said("user", "ask-two")],
        ("rule-one", "ask-one", "say-one", "rule-two", "ask-two"),
    ),
    "system at the end": (
        [*TALKED, said("user", "ask-two"), said("system", "rule-two")],
        ("rule-one", "ask-one", "say-one", "ask-two", "rule-two"),
    ),
    "system after a result": (
        [*LOOKED, said("system", "rule-two"), said("user", "ask-two")],
        (*WORDS, "rule-two", "ask-two"),
    ),
    "two system messages": (
        [said("system", "rule-zero"), *ASKED],
        ("rule-zero", "rule-one", "ask-one"),
    ),
    "call and result": (LOOKED, ("look", *WORDS)),
    "cut call": (
        [*ASKED, called(A, arguments='{"place": "there-%s", "text": "def f('), result(A)],
        WORDS,
    ),
    "call without JSON": (
        [*ASKED, called(A, arguments="there-%s"), result(A)],
        ("INVALID_JSON", *WORDS),
    ),
    "result, then user": ([*LOOKED, said("user", "ask-two")], (*WORDS, "ask-two")),
    "two calls": (
        [*ASKED, called(A, B), result(A), result(B)],
        (*WORDS, f"there-{B}", f"seen-{B}"),
    ),
    "text beside a call": ([*ASKED, called(A, text="say-one"), result(A)], ("say-one", *WORDS)),
    "two users": ([*ASKED, said("user", "ask-two")], ("rule-one", "ask-one", "ask-two")),
}
#: Templates that lose a part all the same, with the case. An entry that is not true any more fails.
_ALTERNATES = "turns alternate, and no text is written beside a call"
LOSSES = {
    ("Mistral-Small-3.2-24B-Instruct-2506", "text beside a call"): _ALTERNATES,
    ("mistralai-Mistral-Nemo-Instruct-2407", "text beside a call"): _ALTERNATES,
    ("tool_chat_template_mistral", "text beside a call"): _ALTERNATES,
    ("tool_chat_template_mistral_parallel", "text beside a call"): _ALTERNATES,
}
#: Templates that take a later system message at some places only: it is rewritten at all of them,
#: so that a conversation that goes on begins as before.
PARTLY = ("Mistral-Small-3.2-24B-Instruct-2506", "tool_chat_template_gemma3_pythonic")
#: Templates that no request with tools can use.
UNUSABLE = {
    "llama-cpp-deepseek-r1": "with tools it needs the Jinja of llama.cpp",
    "fireworks-ai-llama-3-firefunction-v2": "it reads functions from a variable of its own",
}


@pytest.fixture(params=TEMPLATES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name: str) -> ParallmTokenizer:
    tokenizer = with_template(TEMPLATES[name].read_text())
    # It finds out what the template takes while time passes.
    tokenizer.probe_template()
    return tokenizer


@pytest.fixture(autouse=True)
def time_is_held(tokenizer: ParallmTokenizer) -> Iterator[None]:
    """Give the texts that a test compares one time."""
    del tokenizer
    with at_one_time():
        yield


def raw(tokenizer: ParallmTokenizer, messages: list[Message], tools: Any) -> str | None:
    """Return what the template itself writes; None if it refuses."""
    template = tokenizer.chat_template
    try:
        return tokenizer.render_chat(
            messages, tools=tools, chat_template=template, template_kwargs=VARIABLES
        )
    except InvalidRequestError:
        return None


def is_whole(text: str | None, words: tuple[str, ...]) -> bool:
    return text is not None and all(word in text for word in words)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(
    name: str, tokenizer: ParallmTokenizer, case: str, record_property: Callable[[str, str], None]
) -> None:
    record_property("case", case)
    template = name.partition("/")[2]
    if template in UNUSABLE:
        record_property("outcome", "refused")
        record_property("note", f"`{template}` is not usable: {UNUSABLE[template]}.")
        pytest.skip(UNUSABLE[template])
    messages, words = CASES[case]
    messages = template_messages(messages)
    text = tokenizer.render_chat(messages, tools=[TOOL], template_kwargs=VARIABLES)
    own = raw(tokenizer, messages, [TOOL])
    if (template, case) in LOSSES:
        record_property("outcome", "a part is lost")
        record_property("note", f"`{template}`, {case}: {LOSSES[template, case]}.")
        assert not is_whole(text, words), "it is whole: take it off the list"
        return
    record_property("outcome", "as it is" if text == own else "adapted")
    assert [word for word in words if word not in text] == []
    if is_whole(own, words) and template not in PARTLY:
        assert text == own, "a template that takes it gets it as it is"


def test_a_template_that_takes_all_is_left_alone(name: str, tokenizer: ParallmTokenizer) -> None:
    """Each case alone may be taken where the next turn would not be."""
    conversations = [(template_messages(messages), words) for messages, words in CASES.values()]
    owns = [is_whole(raw(tokenizer, messages, [TOOL]), words) for messages, words in conversations]
    if all(owns):
        assert tokenizer.template_form(has_tools=True).rewrites in ((), (developers_as_systems,))


#: Tools as OpenAI's API takes them.
TOOLS: dict[str, dict[str, Any]] = {
    "no parameters": {"name": "look"},
    "no description": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
    "no type": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"place": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "required": ["place"],
        },
    },
    "reference": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/Place"}},
            "$defs": {"Place": {"enum": ["here", 1, None]}},
        },
    },
}


@pytest.mark.parametrize("kind", TOOLS)
def test_tools_of_every_kind_are_written(
    name: str, tokenizer: ParallmTokenizer, kind: str, record_property: Callable[[str, str], None]
) -> None:
    record_property("case", f"tool: {kind}")
    if name.partition("/")[2] in UNUSABLE or not tokenizer.takes_tools:
        record_property("outcome", "refused")
        pytest.skip("takes no tools")
    (tool,) = chat_tools([{"type": "function", "function": TOOLS[kind]}])
    tools = [tool.for_template()]
    text = tokenizer.render_chat(ASKED, tools=tools, template_kwargs=VARIABLES)
    own = raw(tokenizer, ASKED, tools)
    record_property("outcome", "as it is" if text == own else "adapted")
    assert "look" in text


def test_tools_are_written(
    name: str, tokenizer: ParallmTokenizer, record_property: Callable[[str, str], None]
) -> None:
    record_property("case", "tools")
    template = name.partition("/")[2]
    if template in UNUSABLE:
        pytest.skip(UNUSABLE[template])
    text = tokenizer.render_chat(ASKED, tools=[TOOL], template_kwargs=VARIABLES)
    record_property("outcome", "as it is" if tokenizer.takes_tools else "refused")
    assert ("look" in text) == tokenizer.takes_tools


#: Templates without a switch although they name one, and why.
WITHOUT_SWITCH = {
    "NVIDIA-Nemotron-Nano-v2": "it is a word in a message",
    "openai-gpt-oss-120b": "the model always thinks",
}
SWITCHES = ("enable_thinking", "thinking_mode", "no_think", "reasoning_effort", "thinking_option")


def thinking(tokenizer: ParallmTokenizer, variables: dict[str, Any]) -> str:
    tools = [TOOL] if tokenizer.takes_tools else None
    variables = tokenizer.template_variables(variables)
    return tokenizer.render_chat(ASKED, tools=tools, template_kwargs={**VARIABLES, **variables})


def test_thinking_is_turned_off(
    name: str, tokenizer: ParallmTokenizer, record_property: Callable[[str, str], None]
) -> None:
    record_property("case", "thinking off")
    template = name.partition("/")[2]
    if template in UNUSABLE:
        pytest.skip(UNUSABLE[template])
    off, on = ({"enable_thinking": flag} for flag in (False, True))
    turns = thinking(tokenizer, off) != thinking(tokenizer, on)
    own = tokenizer.template_variables(off) == off
    record_property("outcome", ("as it is" if own else "adapted") if turns else "has none")
    if turns:
        assert thinking(tokenizer, effort_kwargs("none")) == thinking(tokenizer, off)
        assert thinking(tokenizer, effort_kwargs("high")) != thinking(tokenizer, off)
    elif template not in WITHOUT_SWITCH:
        assert not [word for word in SWITCHES if word in (tokenizer.chat_template or "")]


def test_every_effort_is_taken(name: str, tokenizer: ParallmTokenizer) -> None:
    if name.partition("/")[2] in UNUSABLE:
        pytest.skip("see UNUSABLE")
    for effort in EFFORTS:
        assert thinking(tokenizer, effort_kwargs(effort))


#: Templates that write the tools, or the system prompt, into the latest turn of the user only: the
#: prompt of the next turn agrees up to these.
MOVING = {
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "tool_chat_template_mistral",
    "tool_chat_template_mistral3",
    "tool_chat_template_mistral_parallel",
}
BEGINNINGS = {"nothing": [], "system": ASKED[:1], "talk": TALKED, "agent": [*LOOKED, TALKED[-1]]}
CALLED = [called(B), result(B)]
LATEST = said("user", "ask-last")


def with_thoughts(messages: list[Message]) -> list[Message]:
    """Return messages as templates take them; the assistant has thought before each of its own."""
    thoughts = {"reasoning_content": "let me think"}
    return template_messages(
        [each | (thoughts if each["role"] == "assistant" else {}) for each in messages]
    )


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("loop", [[], CALLED, 2 * CALLED], ids=["question", "call", "calls"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_the_next_prompt_agrees_up_to_the_latest_turn(
    name: str, tokenizer: ParallmTokenizer, beginning: str, loop: list[Message], *, has_tools: bool
) -> None:
    template = name.partition("/")[2]
    if template in UNUSABLE or (has_tools and not tokenizer.takes_tools):
        pytest.skip("takes no tools")
    tools = [TOOL] if has_tools else None

    def prompt(*further: Message, plain: Sequence[Message] = ()) -> ImagePrompt:
        return text_prompt(
            [*with_thoughts([*BEGINNINGS[beginning], LATEST, *loop, *further]), *plain],
            None,
            render=lambda messages, _: tokenizer.render_chat(
                messages, tools=tools, template_kwargs=VARIABLES
            ),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            marks=tokenizer,
        )

    try:
        further = (said("assistant", "say-last"), said("user", "ask-next"))
        now, later, unthinking = prompt(), prompt(*further), prompt(plain=further)
    except InvalidRequestError:
        pytest.skip("the template refuses the conversation")
    assert now.turn_start is not None
    before = now.token_ids[: now.turn_start]
    assert later.token_ids[: now.turn_start] == before
    if template not in MOVING:
        assert tokenizer.decode(before) == now.text[: now.text.index(LATEST["content"])]
    if not loop:
        # The answer's own opening may be another in the next prompt; what is before it is not.
        assert now.answer_start is not None
        assert now.turn_start <= now.answer_start
        assert unthinking.token_ids[: now.answer_start] == now.token_ids[: now.answer_start]
        if template not in MOVING:
            assert LATEST["content"] in tokenizer.decode(now.token_ids[: now.answer_start])
