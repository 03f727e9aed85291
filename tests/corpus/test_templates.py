"""Every chat template in conversations of agents: nothing is lost, and nothing refused in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.template_folder import templates, with_template

pytestmark = pytest.mark.sample

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


@pytest.fixture(params=TEMPLATES, scope="module")
def file(request: pytest.FixtureRequest) -> Path:
    return TEMPLATES[request.param]


def test_a_question_is_rendered(file: Path, record_property) -> None:
    record_property("case", "a question")
    tokenizer = with_template(file.read_text())
    question = [{"role": "user", "content": "Why?"}]
    # Some templates are for conversations with tools only.
    tools = [TOOL] if "tool" in file.stem else None
    text = tokenizer.render_chat(question, tools=tools, template_kwargs=VARIABLES)
    assert "Why?" in text
    record_property("outcome", "as it is")
