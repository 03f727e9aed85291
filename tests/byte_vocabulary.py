"""A vocabulary for grammars: each byte, and added tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.masks import ConstrainedRow, GrammarMasks
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.tokenizer.vocabulary import gpt2_byte_map
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec

END = 0
NO_FLAGS = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
_BYTES = gpt2_byte_map()
_FIRST_ADDED = 1 + len(_BYTES)


def byte_level() -> dict[str, Any]:
    """Return the JSON of a tokenizer whose tokens are the bytes, and ``END``."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = {name: number for number, name in enumerate(["<end>", *_BYTES])}
    return {
        "version": "1.0",
        "added_tokens": [{"id": END, "content": "<end>", "special": True} | NO_FLAGS],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


class ByteVocabulary:
    """The bytes, and added tokens with these texts."""

    def __init__(self, added: Sequence[str] = ()) -> None:
        content = byte_level()
        self._added = {text: _FIRST_ADDED + number for number, text in enumerate(added)}
        content["added_tokens"] += [
            {"id": token_id, "content": text, "special": True} | NO_FLAGS
            for text, token_id in self._added.items()
        ]
        size = _FIRST_ADDED + len(added)
        vocabulary = GrammarVocabulary(json.dumps(content), frozenset([END]), size, size)
        self.compiler = GrammarCompiler(vocabulary)

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of a text, in which added tokens are tokens."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._added))})", text)
        return [
            token_id
            for piece in pieces
            for token_id in ([self._added[piece]] if piece in self._added else self.bytes_of(piece))
        ]

    def bytes_of(self, text: str) -> list[int]:
        """Return a token for each byte of a text."""
        numbers = {byte: 1 + number for number, byte in enumerate(_BYTES.values())}
        return [numbers[byte] for byte in text.encode()]

    def refused(self, params: SamplingParams, token_ids: Iterable[int]) -> int | None:
        """Return the place of the first token that the grammar's masks do not allow; else None."""
        masks, output = GrammarMasks(self.compiler), list[int]()
        for place, token_id in enumerate(token_ids):
            sample = SampleSpec(
                params=params, seed=0, position=0, prompt_ids=(1,), output_ids=output
            )
            masked = masks.compute([ConstrainedRow(0, 0, sample)])
            if masked.failed or not int(masked.words[0, token_id // 32]) >> token_id % 32 & 1:
                return place
            output.append(token_id)
        return None
