"""Conversations that a chat template refuses, or writes without a part of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.tokenizer.jinja_chat import JinjaChat
from mlx_parallm.tokenizer.rewrites import ACKNOWLEDGED, one_call_at_a_time, systems_into_users
from mlx_parallm.tokenizer.template_form import UNPROBED, TemplateForm, probed_form, probed_tools
from mlx_parallm.types.errors import InvalidRequestError
from tests.strict_templates import NO_SYSTEM, TEMPLATES

Message = dict[str, Any]


def render(template: str, messages: list[Message]) -> str:
    try:
        return JinjaChat(template, {}).render(messages)
    except Exception as problem:
        raise InvalidRequestError(str(problem), param="messages") from problem


FORMS = {
    name: probed_form(lambda messages, template=template: render(template, messages))
    for name, template in TEMPLATES.items()
}


def said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def called(*ids: str, text: str = "") -> Message:
    calls = [
        {"id": id_, "type": "function", "function": {"name": "f", "arguments": {"v": f"arg-{id_}"}}}
        for id_ in ids
    ]
    return said("assistant", text) | {"tool_calls": calls}


def result(id_: str) -> Message:
    return said("tool", f"result-{id_}") | {"tool_call_id": id_}


def names(form: TemplateForm) -> list[str]:
    return [getattr(rewrite, "__name__", "") for rewrite in form.rewrites]


@pytest.mark.parametrize(
    ("template", "rewrites"),
    [
        ("free", []),
        ("system first", ["developers_as_systems", "later_systems_into_users"]),
        ("system dropped", ["developers_as_systems", "later_systems_into_users"]),
        (
            "no system",
            ["systems_into_users", "joined_users", "joined_assistants", "answers_before_users"],
        ),
        ("one call", ["one_call_at_a_time", "text_before_calls"]),
        (
            "system last",
            ["developers_as_systems", "later_systems_into_users", "system_beside_last_user"],
        ),
        ("text arguments", ["arguments_as_text"]),
    ],
)
def test_only_what_a_template_lacks_is_rewritten(template: str, rewrites: list[str]) -> None:
    assert set(names(FORMS[template])) - {"developers_as_systems"} == set(rewrites) - {
        "developers_as_systems"
    }


def test_a_template_that_takes_all_gets_the_messages_as_they_are() -> None:
    messages = [said("system", "s"), said("user", "u"), called("a", "b"), said("system", "t")]
    assert FORMS["free"].fit(messages) == messages


def test_a_form_can_be_sent_to_another_process() -> None:
    for form in FORMS.values():
        assert pickle.loads(pickle.dumps(form)) == form


def test_a_template_that_refuses_a_question_cannot_be_probed() -> None:
    def refuse(messages: list[Message]) -> str:
        raise InvalidRequestError("wants variables", param="messages")

    assert probed_form(refuse) == TemplateForm(losses=(UNPROBED,))


def test_what_a_later_rewrite_helps_with_is_no_loss() -> None:
    # Turns alternate, and calls are not written, as in Gemma 2.
    template = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] or "
        "(m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception(m.role) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )

    def write(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "".join(f"!{arguments}" for _, arguments in calls)

    form = probed_form(lambda messages: render(template, messages), write)
    assert form.losses == ()
    messages = [said("user", "u"), called("a", "b"), result("a"), result("b")]
    assert "result-a\n\nresult-b" in render(template, form.fit(messages))


def test_what_cannot_be_helped_is_named() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    form = probed_form(lambda messages: render(template, messages))
    assert "tool calls" in form.losses
    assert "text beside a tool call" not in form.losses
    assert "assistants' turns in a row" in form.losses


def test_a_system_message_stays_at_its_place() -> None:
    messages = [
        said("system", "s0"),
        said("system", "s1"),
        *(said("user", "u0"), said("assistant", "a0"), said("system", "s2"), said("user", "u1")),
        *(said("system", "s3"), called("a"), said("system", "s4"), result("a")),
        said("system", "s5"),
    ]
    fitted = FORMS["system first"].fit(messages)
    assert [(each["role"], each["content"]) for each in fitted] == [
        ("system", "s0\n\ns1"),
        ("user", "u0"),
        ("assistant", "a0"),
        ("user", "s2\n\nu1\n\ns3"),
        ("assistant", ""),
        ("tool", "result-a"),
        ("user", "s4\n\ns5"),
    ]


def test_without_a_user_the_first_system_message_takes_it() -> None:
    messages = [said("system", "s0"), said("assistant", "a0"), said("system", "s1")]
    fitted = FORMS["system first"].fit(messages)
    assert fitted == [said("system", "s0\n\ns1"), said("assistant", "a0")]


def test_a_system_message_joins_a_turn_with_images() -> None:
    image = {"type": "image"}
    parts = [image, {"type": "text", "text": "u"}]
    (turn,) = systems_into_users([said("user", parts), said("system", "s")])
    assert turn["content"] == [image, {"type": "text", "text": "u\n\ns"}]
    (turn,) = systems_into_users([said("system", "s"), said("user", parts)])
    assert turn["content"] == [{"type": "text", "text": "s"}, *parts]


def test_calls_are_followed_by_their_own_results() -> None:
    messages = [said("user", "u"), called("a", "b", text="x"), result("b"), result("a")]
    fitted = FORMS["one call"].fit(messages)
    assert [(each["role"], each["content"]) for each in fitted] == [
        ("user", "u"),
        ("assistant", "x"),
        ("assistant", ""),
        ("tool", "result-a"),
        ("assistant", ""),
        ("tool", "result-b"),
    ]
    assert [each["tool_calls"][0]["id"] for each in fitted if "tool_calls" in each] == ["a", "b"]


def unnamed(message: Message) -> Message:
    """Return a message without the ids of its calls, or of the call it answers."""
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    named = {key: value for key, value in message.items() if key != "tool_call_id"}
    return named | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize(
    ("call", "results", "contents"),
    [
        (called("a", "b"), [result("b")], ["", "", "result-b"]),
        (called("a", "b"), [result("a")], ["", "result-a", ""]),
        (called("a", "b"), [result("c"), result("b")], ["", "", "result-b", "result-c"]),
        (called("a", "b"), [unnamed(result("x")), result("a")], ["", "result-a", "", "result-x"]),
        (called("a", "b"), [unnamed(result("x")), result("b")], ["", "result-x", "", "result-b"]),
        (called("a", "b"), [unnamed(result("x"))], ["", "result-x", ""]),
        (unnamed(called("a", "b")), [result("x"), result("y")], ["", "result-x", "", "result-y"]),
    ],
)
def test_a_result_stays_with_the_call_that_it_names(
    call: Message, results: list[Message], contents: list[str]
) -> None:
    fitted = one_call_at_a_time([call, *results])
    assert [each["content"] for each in fitted] == contents


@pytest.mark.parametrize("empty", ["", " \n", None, [], [{"type": "text", "text": ""}]])
def test_an_empty_system_message_makes_no_turn(empty: Any) -> None:
    system, user, answer = said("system", empty), said("user", "u"), said("assistant", "a")
    for messages in (
        [system, user, answer],
        [user, system, answer],
        [user, answer, system, answer],
        [user, answer, system],
        [user, system, answer, system, user, system],
    ):
        expected = [message for message in messages if message is not system]
        assert systems_into_users(messages) == expected
    assert [turn["role"] for turn in systems_into_users([system])] == ["user"]


def test_a_turn_of_the_assistant_stands_between_a_result_and_a_user() -> None:
    messages = [said("user", "u"), called("a"), result("a"), said("user", "v")]
    assert FORMS["no system"].fit(messages)[3:] == [
        said("assistant", ACKNOWLEDGED),
        said("user", "v"),
    ]


def test_calls_that_a_template_leaves_out_are_text() -> None:
    def write(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "".join(f"!{name}{arguments}" for name, arguments in calls)

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [said("user", "u"), called("a", "b", text="x"), result("a"), result("b")]
    form = probed_form(lambda messages: render(template, messages), write)
    calls = "!f{'v': 'arg-a'}!f{'v': 'arg-b'}"
    turns = f"<user>u<assistant>x\n\n{calls}"
    assert render(template, form.fit(messages)) == turns + "<tool>result-a<tool>result-b"
    talks = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    form = probed_form(lambda messages: render(talks, messages), write)
    assert render(talks, form.fit(messages)) == turns + "<user>result-a<user>result-b"


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"v": {"type": "string"}, "w": True}},
    },
}


@pytest.mark.parametrize(
    ("template", "described"),
    [
        ("{{ tools | tojson }}", None),
        ("{% for t in tools %}{{ t.function.name + t.function.description }}{% endfor %}", ""),
        (
            "{% for t in tools %}{{ t.function.name }}"
            "{% for p in t.function.parameters.properties.values() if p is mapping %}"
            "{{ '' + p.description }}{% endfor %}{% endfor %}",
            "",
        ),
        ("no tools", None),
    ],
)
def test_tools_get_the_descriptions_that_a_template_reads(
    template: str, described: str | None
) -> None:
    def write(tools: list[dict[str, Any]]) -> str:
        try:
            return JinjaChat(template, {}).render([said("user", "u")], tools=tools)
        except Exception as problem:
            raise InvalidRequestError(str(problem), param="messages") from problem

    form = TemplateForm(tools=probed_tools(write))
    (tool,) = form.fit_tools([TOOL])
    assert tool["function"].get("description") == described
    assert (tool == TOOL) == (described is None)
    write([tool])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Conversations of agents, in which each message has a text of its own."""
    numbers = iter(range(1000))
    messages = [said("system", f"system-{next(numbers)}-") for _ in range(draw(st.integers(0, 2)))]
    messages.append(said("user", f"user-{next(numbers)}-"))
    for kind in draw(st.lists(st.sampled_from(["user", "answer", "calls", "system"]), max_size=8)):
        last = messages[-1]["role"]
        if kind == "calls":
            ids = [f"c{next(numbers):03}" for _ in range(draw(st.integers(1, 3)))]
            messages += [called(*ids), *map(result, draw(st.permutations(ids)))]
        elif kind == "answer":
            # An answer before any user, or with calls after it, is what no template has to take.
            if last in ("user", "tool", "system"):
                messages.append(said("assistant", f"assistant-{next(numbers)}-"))
        else:
            messages.append(said(kind, f"{kind}-{next(numbers)}-"))
    if messages[-1]["role"] == "assistant":
        messages.append(said("user", f"user-{next(numbers)}-"))
    return messages


def texts(messages: list[Message]) -> list[str]:
    parts = [message["content"] for message in messages if message["content"]]
    for message in messages:
        parts += [call["function"]["arguments"]["v"] for call in message.get("tool_calls", ())]
    return parts


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
def test_nothing_is_lost(name: str, messages: list[Message]) -> None:
    text = render(TEMPLATES[name], FORMS[name].fit(messages))
    assert [word for word in texts(messages) if text.count(word) != 1] == []


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "system last"])
@given(messages=conversations(), cut=st.integers(1, 10))
def test_a_conversation_that_goes_on_begins_as_before(
    name: str, messages: list[Message], cut: int
) -> None:
    # The model continues after a user, a result or a system message, when all results are there.
    if cut >= len(messages) or "tool" in (messages[cut]["role"],):
        return
    if messages[cut - 1]["role"] == "assistant":
        return
    before = FORMS[name].fit(messages[:cut])
    after = FORMS[name].fit(messages)
    *same, last = before
    assert after[: len(same)] == same
    assert after[len(same)]["role"] == last["role"]
    assert after[len(same)]["content"].startswith(last["content"])


def test_turns_alternate_where_they_must() -> None:
    messages = [said("user", "u"), said("system", "s"), said("user", "v"), said("user", "w")]
    assert render(NO_SYSTEM, FORMS["no system"].fit(messages)) == "<user>u\n\ns\n\nv\n\nw"
