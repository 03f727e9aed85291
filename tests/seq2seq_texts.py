"""Encoder-decoders with a tokenizer of their own, whose outputs transformers wrote down.

scripts/golden_seq2seq_texts.py needs this module where there is no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.builders.seq2seq_folders import FAMILIES, read_json, transformers_tokenizer, write_json

#: ``TEXTS``: the sources.
TEXTS = ("the cat saw two birds", "hello to the world; one of them said", "a mat")
#: ``WIDTHS``: numbers of beams.
WIDTHS = (1, 4)
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "scale_embedding": True,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
_GENERATION = {
    "min_length": 4,
    "max_length": 14,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "length_penalty": 0.8,
    "early_stopping": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """A family, and what its requests and files have besides.

    Attributes:
        family: the key of ``FAMILIES``.
        languages: "src_lang" and "tgt_lang" of requests.
        before: the text that names the target's language for transformers.
        generation: further fields of ``generation_config.json``.
    """

    family: str
    languages: Mapping[str, str] = field(default_factory=dict[str, str])
    before: str = ""
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def write(self, folder: Path) -> None:
        """Write all files but the weights."""
        FAMILIES[self.family](folder)
        config = read_json(folder, "config.json")
        ids = _special_ids(folder)
        banned = config.pop("bad_words_ids", None)
        start = config.get("decoder_start_token_id")
        own = _T5 if config["model_type"] == "t5" else _BART
        write_json(folder, "config.json", {**config, **own, **ids})
        generation: dict[str, Any] = {
            **_GENERATION,
            "eos_token_id": ids["eos_token_id"],
            "pad_token_id": ids["pad_token_id"],
            "forced_eos_token_id": ids["eos_token_id"],
            "decoder_start_token_id": start,
            "bad_words_ids": banned,
            **self.generation,
        }
        write_json(folder, "generation_config.json", generation)


#: ``CASES``: by family.
CASES = {
    case.family: case
    for case in (
        TextCase(family="t5"),
        TextCase(family="madlad", languages={"tgt_lang": "de"}, before="<2de> "),
        TextCase(family="byt5"),
        TextCase(family="bart", generation={"forced_bos_token_id": 0}),
        TextCase(family="pegasus"),
        TextCase(family="mbart", languages={"src_lang": "en_XX", "tgt_lang": "de_DE"}),
        TextCase(family="nllb", languages={"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}),
        TextCase(family="m2m-100", languages={"src_lang": "en", "tgt_lang": "de"}),
        TextCase(family="marian", generation={"renormalize_logits": True}),
    )
}


def _special_ids(folder: Path) -> dict[str, int]:
    """Return the fields of a config that follow from its tokenizer."""
    tokenizer = transformers_tokenizer(folder)
    size = max(tokenizer.get_vocab().values()) + 1
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return {"vocab_size": size, "eos_token_id": eos, "pad_token_id": pad}
