"""The variables by which a chat template turns thinking on and off, and sets its effort.

Requests say ``enable_thinking`` and ``reasoning_effort``; some templates have other names and
values for them. Probes find these out when a template is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.types.errors import InvalidRequestError

ENABLE = "enable_thinking"
EFFORT = "reasoning_effort"
# NONE: the effort that is no thinking.
NONE = "none"
# EFFORTS: those that requests ask for, from least to most.
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
# _EFFORT_NAMES: names of the effort in templates; Kimi K3 has the second one, Muse the third.
_EFFORT_NAMES = (EFFORT, "thinking_effort", "reasoning_strength")
# _OFF_EFFORTS: efforts that are no thinking; Hunyuan 3 has the first one, Solar the second.
_OFF_EFFORTS = ("no_think", "minimal")

Render = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Switch:
    """A variable that turns thinking on and off.

    Attributes:
        name: of the variable.
        on: its value with thinking; None: it is not set then.
        off: its value without.
    """

    name: str
    on: Any
    off: Any


# _SWITCHES: the first that changes what a template writes is taken. Sources: the templates of
# DeepSeek V3.1, Granite 3.3 and Kimi K3; MiniMax M3; Command A; Ling 3; Seed-OSS.
_SWITCHES = (
    Switch(ENABLE, on=True, off=False),
    Switch("thinking", on=True, off=False),
    Switch("thinking_mode", on="enabled", off="disabled"),
    Switch("reasoning", on=True, off=False),
    Switch("thinking_option", on="on", off="off"),
    Switch("thinking_budget", on=None, off=0),
)


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """A template's own names and values; it can be pickled.

    Attributes:
        switch: turns thinking on and off; None if nothing does.
        effort: the name of the effort; None if there is none.
        efforts: the template's value for efforts that it refuses.
    """

    switch: Switch | None = None
    effort: str | None = None
    efforts: Mapping[str, str] = field(default_factory=dict[str, str])

    def translated(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return variables with those that the template reads; its own names win if both are set.

        Without ``enable_thinking``, the template's own switch says what that is.
        """
        result = dict(variables)
        effort = result.get(EFFORT)
        if self.effort is not None and isinstance(effort, str) and effort != NONE:
            result.setdefault(self.effort, self.efforts.get(effort, effort))
            result[self.effort] = self.efforts.get(result[self.effort], result[self.effort])
        switch = self.switch
        if switch is None or switch.name == ENABLE:
            return result
        if switch.name == self.effort:
            return result | self._as_effort(result, switch)
        if ENABLE not in result and switch.name in result:
            result[ENABLE] = result[switch.name] != switch.off
        value = switch.on if result.get(ENABLE, True) else switch.off
        if ENABLE in result and value is not None:
            result.setdefault(switch.name, value)
        return result

    def merged(self, defaults: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the translated variables of a request over default ones.

        What the request says of thinking or its effort, by either name, replaces the defaults of
        both names. Defaults that are no contradiction stay, such as a budget of thinking.
        """
        kept = dict(defaults)
        switch, effort = self.switch, self.effort
        if switch is not None and (ENABLE in variables or switch.name in variables):
            kept.pop(ENABLE, None)
            if not variables.get(ENABLE, True) or kept.get(switch.name) in (switch.off, NONE):
                kept.pop(switch.name, None)
            if kept.get(EFFORT) == NONE:
                del kept[EFFORT]
        if effort is not None and (EFFORT in variables or effort in variables):
            kept.pop(EFFORT, None)
            kept.pop(effort, None)
        return self.translated({**kept, **variables})

    def _as_effort(self, variables: Mapping[str, Any], switch: Switch) -> dict[str, Any]:
        """Return the effort where that is the switch too."""
        if ENABLE not in variables:
            return {}
        if not variables[ENABLE]:
            return {switch.name: switch.off}
        return {switch.name: variables.get(switch.name, switch.on)}


def probed_thinking(render: Render, template: str | None) -> ThinkingVariables:
    """Return the variables that a template reads.

    Args:
        render: writes a question with variables; raises InvalidRequestError if it is refused.
        template: the template's text; None if it is no single text.
    """
    switch = next((each for each in _SWITCHES if _changes(render, template, each)), None)
    name = next((each for each in _EFFORT_NAMES if _reads_effort(render, template, each)), None)
    if name is None:
        return ThinkingVariables(switch)
    if switch is None:
        values = [each for each in _OFF_EFFORTS if _is_literal(each, template or "")]
        switch = Switch(name, on="high", off=values[0]) if values else None
    accepted = [each for each in EFFORTS if _written(render, {name: each}) is not None]
    nearest = {effort: _nearest(effort, accepted) for effort in EFFORTS if effort not in accepted}
    return ThinkingVariables(switch, name, nearest if accepted else {})


def _changes(render: Render, template: str | None, switch: Switch) -> bool:
    """True if the prompt with thinking is not the one without."""
    if template is not None and switch.name not in template:
        return False
    on = {} if switch.on is None else {switch.name: switch.on}
    off = _written(render, {switch.name: switch.off})
    return off is not None and off != _written(render, on)


def _reads_effort(render: Render, template: str | None, name: str) -> bool:
    """True if efforts give different prompts."""
    if template is not None and name not in template:
        return False
    return len({_written(render, {name: each}) for each in EFFORTS}) > 1


def _nearest(effort: str, accepted: list[str]) -> str:
    """Return the next effort above that is accepted, or the most."""
    above = EFFORTS[EFFORTS.index(effort) :]
    return next((each for each in above if each in accepted), accepted[-1])


def _is_literal(value: str, template: str) -> bool:
    return f"'{value}'" in template or f'"{value}"' in template


def _written(render: Render, variables: Mapping[str, Any]) -> str | None:
    try:
        return render(variables)
    except InvalidRequestError:
        return None
