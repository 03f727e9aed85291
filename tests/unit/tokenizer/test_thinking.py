"""Thinking is turned off by the template's own variable."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from mlx_parallm.api.turns.fields import effort_kwargs
from mlx_parallm.tokenizer.jinja_chat import JinjaChat
from mlx_parallm.tokenizer.thinking import EFFORTS, ThinkingVariables, probed_thinking
from mlx_parallm.types.errors import InvalidRequestError

#: A template's text, and what it writes without thinking and with it.
TEMPLATES = {
    "qwen": (
        "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}",
        "off",
        "",
    ),
    "deepseek": ("{{ 'on' if thinking else 'off' }}", "off", "on"),
    "minimax": ("{{ thinking_mode | default('adaptive') }}", "disabled", "enabled"),
    "command": ("{{ 'off' if reasoning is defined and not reasoning }}", "off", ""),
    "ling": ("{{ thinking_option | default('on') }}", "off", "on"),
    "seed": ("{{ 'off' if thinking_budget is defined and thinking_budget == 0 }}", "off", ""),
    "solar": ("{{ 'off' if reasoning_effort in ['low', 'minimal'] else 'on' }}", "off", "on"),
    "hunyuan": (
        "{% set effort = reasoning_effort | default('no_think') %}"
        "{% if effort not in ['high', 'low', 'no_think'] %}{{ raise_exception(effort) }}{% endif %}"
        "{{ effort }}",
        "no_think",
        "high",
    ),
}
KIMI = (
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking %}{% set effort = thinking_effort | default('max') %}"
    "{% if effort not in ['low', 'high', 'max'] %}{{ raise_exception(effort) }}{% endif %}"
    "{{ effort }}{% endif %}"
)


def render(template: str, variables: Mapping[str, Any]) -> str:
    try:
        return JinjaChat(template, {}).render([{"role": "user", "content": "x"}], **variables)
    except Exception as problem:
        raise InvalidRequestError(str(problem), param="messages") from problem


def probed(template: str) -> ThinkingVariables:
    return probed_thinking(lambda variables: render(template, variables), template)


@pytest.mark.parametrize("name", TEMPLATES)
def test_thinking_is_turned_off_and_on(name: str) -> None:
    template, off, on = TEMPLATES[name]
    thinking = pickle.loads(pickle.dumps(probed(template)))
    for wanted in ({"enable_thinking": False}, effort_kwargs("none")):
        assert render(template, thinking.translated(wanted)) == off
    assert render(template, thinking.translated({"enable_thinking": True})) == on
    assert render(template, thinking.translated(effort_kwargs("high"))) == on


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("template", [template for template, _, _ in TEMPLATES.values()] + [KIMI])
def test_no_effort_is_refused(template: str, effort: str) -> None:
    render(template, probed(template).translated(effort_kwargs(effort)))


def test_an_effort_has_the_templates_name_and_value() -> None:
    thinking = probed(KIMI)
    efforts = [
        render(KIMI, thinking.translated(effort_kwargs(effort))) for effort in ("none", *EFFORTS)
    ]
    assert efforts == ["", "low", "low", "high", "high", "max", "max"]


def test_the_templates_own_name_wins() -> None:
    thinking = probed(TEMPLATES["deepseek"][0])
    both = {"enable_thinking": False, "thinking": True}
    assert thinking.translated(both) == both


def test_the_templates_own_name_says_whether_thinking_is_wanted() -> None:
    thinking = probed(TEMPLATES["minimax"][0])
    assert thinking.translated({"thinking_mode": "disabled"})["enable_thinking"] is False
    assert thinking.translated({"thinking_mode": "adaptive"})["enable_thinking"] is True
    assert thinking.translated({}) == {}


def test_a_template_that_reads_the_common_names_gets_the_wantedas_they_are() -> None:
    thinking = probed(TEMPLATES["qwen"][0])
    for wanted in ({"enable_thinking": False, "x": 1}, effort_kwargs("low"), {}):
        assert thinking.translated(wanted) == wanted


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_request_turns_thinking_on_or_off_whatever_the_default_is(name: str) -> None:
    template, off, on = TEMPLATES[name]
    thinking = probed(template)
    switch = thinking.switch
    assert switch is not None
    own_off, own_on = {switch.name: switch.off}, {switch.name: switch.on}
    defaults = [{"enable_thinking": False}, {"enable_thinking": True}, effort_kwargs("none"), {}]
    for default in (*defaults, own_off, own_on, thinking.translated({"enable_thinking": False})):
        for wanted in ({"enable_thinking": False}, own_off, effort_kwargs("none")):
            assert render(template, thinking.merged(default, wanted)) == off, (default, wanted)
        for wanted in ({"enable_thinking": True}, own_on):
            if wanted.get(switch.name, True) is not None:
                assert render(template, thinking.merged(default, wanted)) == on, (default, wanted)
        assert thinking.merged(default, {"x": 1}) == {**thinking.translated(default), "x": 1}


def test_a_default_that_is_no_contradiction_stays() -> None:
    wanted = {"enable_thinking": True}
    assert probed(TEMPLATES["seed"][0]).merged({"thinking_budget": 512}, wanted) == {
        **wanted,
        "thinking_budget": 512,
    }
    hunyuan = probed(TEMPLATES["hunyuan"][0])
    assert hunyuan.merged({"reasoning_effort": "low"}, wanted)["reasoning_effort"] == "low"


def test_the_effort_of_a_request_replaces_the_default_of_the_templates_name() -> None:
    variables = probed(KIMI).merged({"thinking_effort": "max"}, effort_kwargs("low"))
    assert render(KIMI, variables) == "low"
