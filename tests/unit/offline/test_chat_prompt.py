"""Conversations of ``LLM.chat`` as prompts."""

from __future__ import annotations

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.offline.images import chat_prompt
from mlx_parallm.tokenizer.loading import load_tokenizer
from tests.fakes import make_info
from tests.strict_templates import FREE


def test_a_cut_call_can_be_sent_back() -> None:
    model = GenerationModel(
        names=("demo",),
        root="demo",
        created=0,
        tokenizer=load_tokenizer(DEMO_FOLDER, chat_template=FREE),
        info=make_info(),
    )
    function = {"name": "write", "arguments": '{"path": "a.py", "text": "def f('}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    assert chat_prompt(messages, model).text == '<user>u<assistant>!{"path": "a.py"}<tool>r'
