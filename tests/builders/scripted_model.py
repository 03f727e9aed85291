"""A model folder that writes given texts: the length of the prompt says which.

It is a GPT-2 of one layer without effect. Its position embeddings choose the next token, so that
each script has a range of positions for itself. A grammar may still forbid what it would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_parallm.tokenizer.vocabulary import gpt2_byte_map
from tests.byte_vocabulary import END, NO_FLAGS, byte_level

#: What a prompt consists of, and what the template writes before it if there are tools.
FILLER, TOOLS = ".", "T"
TEMPLATE = f"{{% if tools %}}{TOOLS}{{% endif %}}{{{{ messages[-1]['content'] }}}}"
#: Tokens that most vocabularies have, and that no turn should hold.
COMMON = ("<pad>", "<s>", "</s>", "<|endoftext|>")
_NUM_HEADS = 2
# _CERTAINTY: how much the position counts in the hidden state, where the token counts 1.
_CERTAINTY = 64.0
_SPECIAL = re.compile(r"\]<\]\w+\[>\[|<[^<>\s]*>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Typed:
    """A text that is written byte by byte, even if it looks like special tokens."""

    text: str


#: ``Script``: a turn. What looks like special tokens in a ``str`` is written with these.
Script = Sequence[str | Typed]


def special_tokens_in(texts: Iterable[str]) -> list[str]:
    """Return what may be special tokens in the markers of a format."""
    return list(dict.fromkeys(token for text in texts for token in _SPECIAL.findall(text)))


def write_scripted_model(
    folder: Path, scripts: Sequence[Script], special_tokens: Sequence[str]
) -> list[str]:
    """Write a model of these scripts; each is followed by the end of the turn.

    Returns:
        For each script, the user's message that starts it in a request with tools.
    """
    content = byte_level()
    first = len(content["model"]["vocab"])
    added = {text: first + n for n, text in enumerate(dict.fromkeys([*COMMON, *special_tokens]))}
    content["added_tokens"] += [
        {"id": token_id, "content": text, "special": True} | NO_FLAGS
        for text, token_id in added.items()
    ]
    # The tools' letter is at the first position, which therefore belongs to no script.
    next_tokens = [END]
    messages: list[str] = []
    for script in scripts:
        messages.append(FILLER * len(next_tokens))
        next_tokens += [*_ids_of(script, added), END]
    vocab_size = -(-(first + len(added)) // _NUM_HEADS) * _NUM_HEADS
    _write_model(folder, next_tokens, vocab_size)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return messages


def _ids_of(script: Script, added: Mapping[str, int]) -> Iterator[int]:
    numbers = {byte: 1 + number for number, byte in enumerate(gpt2_byte_map().values())}
    longest_first = sorted(added, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    for piece in script:
        texts = [piece.text] if isinstance(piece, Typed) else pattern.split(piece)
        for text in texts:
            if text in added and isinstance(piece, str):
                yield added[text]
            else:
                yield from (numbers[byte] for byte in text.encode())


def _write_model(folder: Path, next_tokens: Sequence[int], size: int) -> None:
    """Write weights whose hidden state at a position is the embedding of the next token."""
    folder.mkdir(parents=True, exist_ok=True)
    length = len(next_tokens) + 1
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": size,
        "n_embd": size,
        "n_head": _NUM_HEADS,
        "n_layer": 1,
        "n_ctx": length,
        "n_positions": length,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    embeddings = mx.eye(size)
    layer = {
        "attn.c_attn": (size, 3 * size),
        "attn.c_proj": (size, size),
        "mlp.c_fc": (size, 4 * size),
        "mlp.c_proj": (4 * size, size),
    }
    weights = {
        "wte.weight": embeddings,
        "wpe.weight": _CERTAINTY * embeddings[mx.array([*next_tokens, END])],
        **{f"h.0.{name}.weight": mx.zeros(shape) for name, shape in layer.items()},
        **{f"h.0.{name}.bias": mx.zeros(shape[1]) for name, shape in layer.items()},
    }
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        weights |= {f"{name}.weight": mx.ones(size), f"{name}.bias": mx.zeros(size)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
