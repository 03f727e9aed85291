"""Golden cases of DeBERTa and of the encoders with rotary positions."""

from __future__ import annotations

from typing import Any

from scripts.golden_encoder_cases import LABELS, SIZES, GoldenCase, RemoteFormat

#: ``DEBERTA``: v3's settings: log buckets, shared projections, no absolute positions, a table norm.
DEBERTA: dict[str, Any] = {
    **SIZES,
    "relative_attention": True,
    "max_relative_positions": -1,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
#: ``CONVOLUTION``: v2-xlarge's settings, with fields that the released configs leave out.
CONVOLUTION: dict[str, Any] = {
    **DEBERTA,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "conv_groups": 2,
    "position_biased_input": True,
    "type_vocab_size": 2,
    "embedding_size": 24,
}
LONG = (37, 3, 20)

MODERNBERT: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "pad_token_id": 0,
}

NOMIC: dict[str, Any] = {**SIZES, "type_vocab_size": 2}
NOMIC_REMOTE: dict[str, Any] = {
    "model_type": "nomic_bert",
    "vocab_size": 99,
    "pad_vocab_size_multiple": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
    "n_positions": 40,
    "type_vocab_size": 2,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
}
GTE: dict[str, Any] = {**SIZES, "type_vocab_size": 1, "pad_token_id": 0}
GTE_REMOTE: dict[str, Any] = {
    **SIZES,
    "model_type": "new",
    "type_vocab_size": 1,
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "pack_qkv": True,
}


def nomic_weights(prefix: str, *, pooler: bool = False) -> dict[str, list[int]]:
    """Return names and shapes of nomic-embed-text-v1.5 at the sizes of ``NOMIC_REMOTE``."""
    shapes = {
        "embeddings.word_embeddings.weight": [128, 32],
        "embeddings.token_type_embeddings.weight": [2, 32],
        "emb_ln.weight": [32],
        "emb_ln.bias": [32],
    }
    for layer in ("encoder.layers.0", "encoder.layers.1"):
        shapes |= {
            f"{layer}.attn.Wqkv.weight": [96, 32],
            f"{layer}.attn.out_proj.weight": [32, 32],
            f"{layer}.mlp.fc11.weight": [256, 32],
            f"{layer}.mlp.fc12.weight": [256, 32],
            f"{layer}.mlp.fc2.weight": [32, 256],
        }
        for norm in ("norm1", "norm2"):
            shapes |= {f"{layer}.{norm}.weight": [32], f"{layer}.{norm}.bias": [32]}
    if pooler:
        shapes |= {"pooler.dense.weight": [32, 32], "pooler.dense.bias": [32]}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def gte_weights(prefix: str, *, pooler: bool = False) -> dict[str, list[int]]:
    """Return names and shapes of gte-multilingual-base at the sizes of ``GTE_REMOTE``."""
    shapes = {
        "embeddings.word_embeddings.weight": [99, 32],
        "embeddings.token_type_embeddings.weight": [1, 32],
        "embeddings.LayerNorm.weight": [32],
        "embeddings.LayerNorm.bias": [32],
    }
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        shapes |= {
            f"{layer}.attention.qkv_proj.weight": [96, 32],
            f"{layer}.attention.qkv_proj.bias": [96],
            f"{layer}.attention.o_proj.weight": [32, 32],
            f"{layer}.attention.o_proj.bias": [32],
            f"{layer}.mlp.up_gate_proj.weight": [96, 32],
            f"{layer}.mlp.down_proj.weight": [32, 48],
            f"{layer}.mlp.down_proj.bias": [32],
        }
        for norm in ("attn_ln", "mlp_ln"):
            shapes |= {f"{layer}.{norm}.weight": [32], f"{layer}.{norm}.bias": [32]}
    if pooler:
        shapes |= {"pooler.dense.weight": [32, 32], "pooler.dense.bias": [32]}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


CLASSIFIER = {"classifier.weight": [3, 32], "classifier.bias": [3]}
GTE_LM_HEAD = {
    "lm_head.dense.weight": [32, 32],
    "lm_head.dense.bias": [32],
    "lm_head.norm.weight": [32],
    "lm_head.norm.bias": [32],
    "lm_head.decoder.bias": [99],
}
GTE_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
#: ``NOMIC_READ``: the config with which transformers reads the checkpoint of ``NOMIC_REMOTE``.
NOMIC_READ = {**NOMIC, "vocab_size": 128, "intermediate_size": 256}

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}

ROTARY_CASES = [
    GoldenCase("deberta_v2", "deberta-v2", "DebertaV2Model", DEBERTA, lengths=LONG),
    GoldenCase(
        "deberta_v2_conv",
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        CONVOLUTION,
        lengths=LONG,
        token_types=True,
    ),
    GoldenCase(
        "deberta_v2_masked_lm", "deberta-v2", "DebertaV2ForMaskedLM", {**DEBERTA, "legacy": False}
    ),
    GoldenCase(
        "deberta_v2_sequence",
        "deberta-v2",
        "DebertaV2ForSequenceClassification",
        {**DEBERTA, **LABELS, "share_att_key": False},
        lengths=LONG,
    ),
    GoldenCase(
        "deberta_v2_token",
        "deberta-v2",
        "DebertaV2ForTokenClassification",
        {
            **DEBERTA,
            **LABELS,
            "share_att_key": False,
            "pos_att_type": ["c2p"],
            "position_buckets": -1,
            "max_relative_positions": 6,
        },
    ),
    GoldenCase(
        "deberta_v2_p2c",
        "deberta-v2",
        "DebertaV2Model",
        {**DEBERTA, "pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
    ),
    GoldenCase(
        "deberta_v2_absolute",
        "deberta-v2",
        "DebertaV2Model",
        {**SIZES, "type_vocab_size": 2},
        token_types=True,
    ),
    GoldenCase("modernbert", "modernbert", "ModernBertModel", MODERNBERT, lengths=LONG),
    GoldenCase("modernbert_masked_lm", "modernbert", "ModernBertForMaskedLM", MODERNBERT),
    GoldenCase(
        "modernbert_biases",
        "modernbert",
        "ModernBertForMaskedLM",
        {
            **MODERNBERT,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "decoder_bias": False,
            "classifier_bias": True,
            "tie_word_embeddings": False,
            "global_attn_every_n_layers": 2,
        },
    ),
    GoldenCase(
        "modernbert_sequence",
        "modernbert",
        "ModernBertForSequenceClassification",
        {**MODERNBERT, **LABELS, "classifier_pooling": "mean"},
    ),
    GoldenCase(
        "modernbert_sequence_cls",
        "modernbert",
        "ModernBertForSequenceClassification",
        {**MODERNBERT, **LABELS, "global_rope_theta": 5000.0, "local_rope_theta": 700.0},
    ),
    GoldenCase(
        "modernbert_token",
        "modernbert",
        "ModernBertForTokenClassification",
        {**MODERNBERT, **LABELS},
    ),
    GoldenCase("nomic_bert", "nomic_bert", "NomicBertModel", NOMIC, token_types=True),
    GoldenCase("nomic_bert_masked_lm", "nomic_bert", "NomicBertForMaskedLM", NOMIC),
    GoldenCase(
        "nomic_bert_sequence",
        "nomic_bert",
        "NomicBertForSequenceClassification",
        {**NOMIC, **LABELS},
    ),
    GoldenCase(
        "nomic_bert_token", "nomic_bert", "NomicBertForTokenClassification", {**NOMIC, **LABELS}
    ),
    GoldenCase(
        "nomic_bert_remote",
        "nomic_bert",
        "NomicBertModel",
        NOMIC_READ,
        token_types=True,
        remote=RemoteFormat(NOMIC_REMOTE, "NomicBertModel", nomic_weights("")),
    ),
    GoldenCase("gte", "gte", "GteModel", GTE),
    GoldenCase("gte_masked_lm", "gte", "GteForMaskedLM", GTE),
    GoldenCase("gte_sequence", "gte", "GteForSequenceClassification", {**GTE, **LABELS}),
    GoldenCase(
        "gte_token", "gte", "GteForTokenClassification", {**GTE, **LABELS, "type_vocab_size": 0}
    ),
    GoldenCase(
        "new",
        "gte",
        "GteModel",
        {**GTE, **GTE_ROPE},
        remote=RemoteFormat(GTE_REMOTE, "NewModel", gte_weights("")),
    ),
    GoldenCase(
        "new_masked_lm",
        "gte",
        "GteForMaskedLM",
        {**GTE, **GTE_ROPE},
        remote=RemoteFormat(GTE_REMOTE, "NewForMaskedLM", gte_weights("new.") | GTE_LM_HEAD),
    ),
    GoldenCase(
        "new_sequence",
        "gte",
        "GteForSequenceClassification",
        {**GTE, **GTE_ROPE, **LABELS},
        remote=RemoteFormat(
            {**GTE_REMOTE, **LABELS},
            "NewForSequenceClassification",
            gte_weights("new.", pooler=True) | CLASSIFIER,
        ),
    ),
    GoldenCase(
        "new_token",
        "gte",
        "GteForTokenClassification",
        {**GTE, **GTE_ROPE, **LABELS},
        remote=RemoteFormat(
            {**GTE_REMOTE, **LABELS}, "NewForTokenClassification", gte_weights("new.") | CLASSIFIER
        ),
    ),
    # All texts have one length, because transformers scales by the batch's longest text, and this
    # package by each text.
    GoldenCase(
        "nomic_bert_dynamic",
        "nomic_bert",
        "NomicBertModel",
        {**NOMIC, "max_position_embeddings": 8, "rope_parameters": DYNAMIC},
        lengths=(20, 20),
    ),
    GoldenCase(
        "nomic_bert_scaled",
        "nomic_bert",
        "NomicBertModel",
        {**NOMIC_READ, "max_position_embeddings": 16, "rope_parameters": DYNAMIC},
        lengths=(37, 37),
        remote=RemoteFormat(
            {**NOMIC_REMOTE, "rotary_scaling_factor": 2, "max_trained_positions": 16},
            "NomicBertModel",
            nomic_weights(""),
        ),
    ),
    *(
        GoldenCase(
            name,
            "gte",
            "GteModel",
            {**GTE, **GTE_ROPE},
            lengths=LONG,
            remote=RemoteFormat(
                {**GTE_REMOTE, "rope_scaling": {"type": "ntk", **scaling}},
                "NewModel",
                gte_weights(""),
            ),
        )
        for name, scaling in (
            ("new_ntk", {"factor": 8.0}),
            ("new_ntk_mixed", {"factor": 4.0, "mixed_b": 0.75}),
        )
    ),
]
