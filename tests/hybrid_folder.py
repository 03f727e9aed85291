"""The folder of a tiny model with a state, whose template drops the reasoning of earlier turns."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.byte_vocabulary import END, NO_FLAGS, byte_level

# TEMPLATE: as Qwen3's; the assistant's turn begins with an open thought, which is part of no other.
TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.reasoning_content and loop.index0 > ns.last -%}
    {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


def write_hybrid(folder: Path, architecture: str = "lfm2") -> Path:
    """Write a model with random weights whose tokens are bytes, and the marks of turns."""
    content = byte_level()
    first = len(content["model"]["vocab"])
    content["added_tokens"] += [
        {"id": first + number, "content": text, "special": True} | NO_FLAGS
        for number, text in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    config = config_of(architecture) | {"vocab_size": first + 2, "eos_token_id": END}
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
