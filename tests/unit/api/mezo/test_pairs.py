"""Pairs as TRL and OpenAI write them: what is read, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from mlx_parallm.api.mezo.pairs import pair_reader
from mlx_parallm.api.mezo.rows import PairRow
from mlx_parallm.api.mezo.schema import Pairs
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import ChoiceInput
from tests.corpus.template_folder import with_template

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "({{ call.function.name }}){% endfor %}${% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "When?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def said(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content, **fields}]


class Model(SimpleNamespace):
    """A model that reads with the template."""

    def __init__(self) -> None:
        super().__init__(
            tokenizer=with_template(TEMPLATE),
            call_id_length=None,
            max_model_len=1000,
            info=SimpleNamespace(vocab_size=100_000),
        )

    def texts(self, row: dict[str, Any]) -> tuple[str, str, str]:
        """Return the prompt of a pair, and both answers."""
        objective = Pairs.model_validate({"ends": False})
        read = pair_reader(objective, cast("GenerationModel", cast("Any", self)))
        item = read(PairRow.model_validate(row)).input
        assert isinstance(item, ChoiceInput)
        prompt, *answers = (item.token_ids, *item.choices)
        first, second = answers
        decode = self.tokenizer.decode
        return tuple(
            decode(list(ids), skip_special_tokens=False) for ids in (prompt, first, second)
        )  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _as_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.api.mezo.pairs.GenerationModel", Model)


@pytest.mark.parametrize(
    "row",
    [
        {
            "input": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": True},
            "preferred_output": said("Now."),
            "non_preferred_output": said("Later."),
        },
        {"prompt": [USER], "chosen": said("Now."), "rejected": said("Later."), "tools": TOOLS},
        {"prompt": "When?", "chosen": said("Now."), "rejected": "Later.", "tools": TOOLS},
        {"chosen": [USER, *said("Now.")], "rejected": [USER, *said("Later.")], "tools": TOOLS},
    ],
    ids=["openai", "trl", "texts", "no prompt"],
)
def test_tools_are_part_of_the_prompt(row: dict[str, Any]) -> None:
    assert Model().texts(row) == ("[now]<user>When?$<assistant>", "Now.$", "Later.$")


@pytest.mark.parametrize("prompt", ["When?", " When?\n", [USER], None])
@pytest.mark.parametrize("before", [[], [SYSTEM]], ids=["", "system"])
def test_a_prompt_that_answers_repeat_counts_once(prompt: Any, before: list[Any]) -> None:
    row = {
        "prompt": prompt,
        "chosen": [*before, USER, *said("Now.")],
        "rejected": [*before, USER, *said("Later.")],
    }
    system = "<system>Be brief.$" if before else ""
    assert Model().texts(row) == (f"{system}<user>When?$<assistant>", "Now.$", "Later.$")


def test_a_text_before_answers_alone_is_the_users() -> None:
    row = {"prompt": "When?", "chosen": said("Now."), "rejected": said("Later.")}
    assert Model().texts(row) == ("<user>When?$<assistant>", "Now.$", "Later.$")


def test_messages_before_other_turns_are_all_read() -> None:
    chosen, rejected = [USER, *said("Now.")], [USER, *said("Later.")]
    row = {"prompt": [SYSTEM], "chosen": chosen, "rejected": rejected}
    assert Model().texts(row)[0] == "<system>Be brief.$<user>When?$<assistant>"


@pytest.mark.parametrize("begin", [[USER], [SYSTEM], [SYSTEM, USER]], ids=len)
def test_a_text_before_other_turns_is_refused(begin: list[Any]) -> None:
    row = {"prompt": "Where?", "chosen": said("Now."), "rejected": [*begin, *said("Later.")]}
    with pytest.raises(InvalidRequestError, match="rejected begins neither with"):
        Model().texts(row)


def test_a_call_is_an_answer() -> None:
    row = {"prompt": [USER], "chosen": said(None, tool_calls=[CALL]), "rejected": said("Later.")}
    prompt, chosen, rejected = Model().texts(row | {"tools": TOOLS})
    assert prompt == "[now]<user>When?$<assistant>"
    assert "now" in chosen
    assert rejected == "Later.$"


@pytest.mark.parametrize("name", ["chosen", "rejected"])
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "cannot be empty"),
        (said(""), "cannot be empty"),
        (said(None), "cannot be empty"),
        (said("\n"), "cannot be empty"),
        (said([{"type": "text", "text": ""}]), "cannot be empty"),
        ([*said("Now."), USER], "needs an assistant's turn at its end"),
        ([USER], "needs an assistant's turn at its end"),
    ],
)
def test_what_says_nothing_is_refused(name: str, answer: Any, why: str) -> None:
    row = {"prompt": [USER], "chosen": said("Now."), "rejected": said("Later.")}
    with pytest.raises(ValidationError, match=f"{name} {why}"):
        PairRow.model_validate(row | {name: answer})


@pytest.mark.parametrize("second", [said("Now."), "Now."])
def test_equal_answers_are_refused(second: Any) -> None:
    row = {"prompt": [USER], "chosen": said("Now."), "rejected": second}
    with pytest.raises(InvalidRequestError, match="two equal texts"):
        Model().texts(row)
