"""The encoder-decoders that this package serves, as tiny configs with golden values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: ``SIZES``: fields of a tiny T5.
T5_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
#: ``UNTIED``: T5's config.json as transformers 4 writes it for a model of v1.1. None: not there.
UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "scale_decoder_outputs": None}


@dataclass(frozen=True, slots=True)
class Seq2SeqCase:
    """A model of transformers.

    Attributes:
        name: of the case.
        model_type: the name in transformers.
        config: fields of its config class.
        written: fields of config.json that differ from what transformers 5 writes; None: no field.
        renamed: names of weights that transformers 5 saves, and the names that they get.
        added: further weights, by the name of one with their shape.
        omitted: names of weights that transformers saves and does not need.
        tolerance: how far logits may be from these values, as a share of the largest.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    tolerance: float = 1e-4


def _t5(name: str, model_type: str = "t5", **fields: Any) -> Seq2SeqCase:
    """Return a case whose scores are not scaled, which makes rounding errors larger."""
    config = T5_SIZES | fields.pop("config", {})
    return Seq2SeqCase(name, model_type, config, tolerance=1e-3, **fields)


GATED = {"feed_forward_proj": "gated-gelu"}
HEAD = {"lm_head.weight": "shared.weight"}
BART_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 320,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
#: ``UNEQUAL``: sizes that the two sides need not have in common.
UNEQUAL: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 40,
}
#: ``OLD_FIELDS``: fields of older configs that say otherwise than the family, and do not count.
OLD_FIELDS: dict[str, Any] = {
    "add_bias_logits": True,
    "add_final_layer_norm": True,
    "extra_pos_embeddings": 1,
    "normalize_before": True,
    "normalize_embedding": False,
    "static_position_embeddings": True,
}


def _bart(name: str, model_type: str, **fields: Any) -> Seq2SeqCase:
    """Return a case with positions up to 320."""
    config = BART_SIZES | fields.pop("config", {})
    return Seq2SeqCase(name, model_type, config, **fields)


MARIAN: dict[str, Any] = {
    "scale_embedding": True,
    "activation_function": "swish",
    "decoder_start_token_id": 63,
    "pad_token_id": 63,
    "eos_token_id": 0,
}
PEGASUS: dict[str, Any] = {
    "scale_embedding": True,
    "activation_function": "relu",
    "pad_token_id": 0,
}
#: ``WHISPER_SIZES``: a tiny Whisper, whose sources have ``max_source_positions``.
WHISPER_SIZES: dict[str, Any] = {
    **{name: BART_SIZES[name] for name in BART_SIZES if name != "max_position_embeddings"},
    "num_mel_bins": 80,
    "max_source_positions": 40,
    "max_target_positions": 96,
    "begin_suppress_tokens": None,
}


def _whisper(name: str, **fields: Any) -> Seq2SeqCase:
    config = WHISPER_SIZES | fields.pop("config", {})
    return Seq2SeqCase(name, "whisper", config, **fields)


POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
TRUNK_HEAD = {"lm_head.weight": "model.shared.weight"}
SEQ2SEQ_CASES: tuple[Seq2SeqCase, ...] = (
    _t5("t5"),
    _t5(
        "t5_buckets",
        config={
            "relative_attention_num_buckets": 12,
            "relative_attention_max_distance": 20,
            "num_layers": 1,
            "num_decoder_layers": 3,
        },
    ),
    _t5("t5_v1_1", config=GATED, written=UNTIED, added=HEAD),
    _t5("t5_v5", config={**GATED, "tie_word_embeddings": False}, added=HEAD),
    _t5("t5_untied_scaled", added=HEAD),
    _t5("flan", config={**GATED, "num_decoder_layers": 3}, written=UNTIED, added=HEAD),
    _t5(
        "madlad",
        config=GATED,
        written=UNTIED,
        renamed={"shared.weight": "decoder.embed_tokens.weight"},
        added=HEAD,
    ),
    _t5("byt5", config={**GATED, "num_layers": 3, "num_decoder_layers": 1}, written=UNTIED),
    _t5("t5_silu", config={"feed_forward_proj": "gated-silu"}),
    _t5("t5_gelu", config={"feed_forward_proj": "gelu"}),
    _t5("mt5", "mt5", written=UNTIED, added=HEAD),
    _t5("mt5_tied", "mt5"),
    _t5("umt5", "umt5", added=HEAD),
    _t5("umt5_tied", "umt5", config={"feed_forward_proj": "relu"}),
    _bart("bart", "bart"),
    _bart("bart_unequal", "bart", config={**UNEQUAL, "activation_function": "relu"}),
    _bart("bart_old_fields", "bart", written=OLD_FIELDS),
    _bart("bart_scaled", "bart", config={"scale_embedding": True}, added=TRUNK_HEAD),
    _bart("bart_gelu_new", "bart", config={"activation_function": "gelu_new"}),
    _bart("mbart", "mbart", config={"scale_embedding": True}),
    _bart("mbart_50", "mbart", config={"scale_embedding": True, "activation_function": "relu"}),
    _bart("pegasus", "pegasus", config=PEGASUS),
    _bart("pegasus_computed", "pegasus", config=PEGASUS, omitted=POSITIONS),
    _bart("m2m_100", "m2m_100", config={"scale_embedding": True}),
    _bart("nllb", "m2m_100", config={**UNEQUAL, "scale_embedding": True}),
    _bart("m2m_100_long", "m2m_100", config={"max_position_embeddings": 80}),
    _bart(
        "m2m_100_padding", "m2m_100", config={"pad_token_id": 7}, written={"scale_embedding": None}
    ),
    _bart("marian", "marian", config=MARIAN),
    _bart(
        "marian_two_tables",
        "marian",
        config={
            **MARIAN,
            "vocab_size": 56,
            "pad_token_id": 55,
            "decoder_vocab_size": 64,
            "share_encoder_decoder_embeddings": False,
        },
    ),
    _bart("marian_untied", "marian", config=MARIAN, added=TRUNK_HEAD),
    _whisper("whisper"),
    _whisper(
        "whisper_large_v3", config={"num_mel_bins": 128, "encoder_layers": 3, "decoder_layers": 3}
    ),
    _whisper(
        "whisper_turbo", config={"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1}
    ),
    _whisper("whisper_window", config={"max_source_positions": 1500, "encoder_layers": 1}),
    _whisper("whisper_head", added={"proj_out.weight": "model.decoder.embed_tokens.weight"}),
)
