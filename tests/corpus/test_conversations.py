"""Every chat template: of a conversation the assistant's messages are learnt, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.mezo.conversations import conversation_input
from mlx_parallm.types.errors import InvalidRequestError
from tests.corpus.template_folder import templates, with_template

pytestmark = pytest.mark.sample

TEMPLATES = dict(templates())
TURNS = (("user", "ask-one?"), ("assistant", "say-one."), ("user", "ask-two?"))
MESSAGES = [
    ChatMessage.model_validate({"role": role, "content": content})
    for role, content in (*TURNS, ("assistant", "say-two."))
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_assistant_wrote_is_learnt(name: str) -> None:
    tokenizer = with_template(TEMPLATES[name].read_text())
    model = cast("Any", SimpleNamespace(tokenizer=tokenizer, call_id_length=None))
    try:
        tokenizer.render_chat([message.model_dump(exclude_none=True) for message in MESSAGES])
    except InvalidRequestError:
        pytest.skip("the template needs more than messages")
    item = conversation_input(MESSAGES, None, model)
    tokens = [
        token for token, weight in zip(item.choices[0], item.weights[0], strict=True) if weight
    ]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.index("say-one.") < text.index("say-two.")
    assert "ask" not in text
