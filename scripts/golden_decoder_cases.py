"""The decoders with golden values: as embedders, classifiers and rerankers, and as generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.golden_encoder_cases import LABELS, SIZES, GoldenCase

DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = {**DECODER, "head_dim": 8, "rope_theta": 1e6}
ONE_LABEL: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3: dict[str, Any] = {
    **DECODER,
    # Embeddings are multiplied by this size's root, which mlx_lm rounds to 16 bits; 4 is exact.
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True)
class DecoderCase(GoldenCase):
    """A decoder; see ``GoldenCase``.

    Attributes:
        chosen: ids of two tokens; the logits are then the difference of their LM-head logits at
            the last token of each sequence.
    """

    chosen: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class GeneratorCase(GoldenCase):
    """A decoder with the head of a language model, whose logits of all tokens are kept."""


GPT2: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
OPT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 40,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
#: ``OPT_350M``: norms after the blocks, and word embeddings narrower than hidden states.
OPT_350M: dict[str, Any] = {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
#: ``OPT_PLAIN``: what OPT's config allows otherwise, all at once.
OPT_PLAIN: dict[str, Any] = {
    **OPT,
    "activation_function": "gelu",
    "enable_bias": False,
    "layer_norm_elementwise_affine": False,
    "_remove_final_layer_norm": True,
    "tie_word_embeddings": False,
}

DECODER_CASES: tuple[DecoderCase, ...] = (
    DecoderCase(
        "qwen3_model", "qwen3", "Qwen3Model", {**QWEN3, "tie_word_embeddings": True}, logits=None
    ),
    DecoderCase(
        "mistral_model",
        "mistral",
        "MistralModel",
        {**DECODER, "head_dim": 8, "sliding_window": None, "tie_word_embeddings": False},
        logits=None,
    ),
    DecoderCase(
        "llama_rope_parameters",
        "llama",
        "LlamaModel",
        {**DECODER, "rope_parameters": LLAMA3_ROPE},
        logits=None,
    ),
    DecoderCase(
        "llama_both_ways", "llama", "LlamaModel", {**DECODER, "is_causal": False}, logits=None
    ),
    DecoderCase(
        "qwen2_both_ways",
        "qwen2",
        "Qwen2ForSequenceClassification",
        {**DECODER, **LABELS, "rope_theta": 1e4, "is_causal": False},
    ),
    DecoderCase(
        "gemma3_both_ways",
        "gemma3_text",
        "Gemma3TextModel",
        {**GEMMA3, "use_bidirectional_attention": True},
        lengths=(11, 3, 16),
        logits=None,
    ),
    DecoderCase(
        "gemma3_window", "gemma3_text", "Gemma3TextModel", GEMMA3, lengths=(11, 3, 16), logits=None
    ),
    DecoderCase(
        "gemma2_sequence",
        "gemma2",
        "Gemma2ForSequenceClassification",
        {**DECODER, **LABELS, "head_dim": 8, "query_pre_attn_scalar": 8},
    ),
    DecoderCase(
        "llama_sequence", "llama", "LlamaForSequenceClassification", {**DECODER, **ONE_LABEL}
    ),
    DecoderCase(
        "mistral_sequence",
        "mistral",
        "MistralForSequenceClassification",
        {**DECODER, **LABELS, "head_dim": 8, "problem_type": "multi_label_classification"},
    ),
    DecoderCase(
        "qwen3_sequence", "qwen3", "Qwen3ForSequenceClassification", {**QWEN3, **ONE_LABEL}
    ),
    DecoderCase("qwen3_token", "qwen3", "Qwen3ForTokenClassification", {**QWEN3, **LABELS}),
    DecoderCase(
        "qwen3_chosen",
        "qwen3",
        "Qwen3ForCausalLM",
        {**QWEN3, "tie_word_embeddings": True},
        chosen=(17, 40),
    ),
    DecoderCase(
        "llama_chosen",
        "llama",
        "LlamaForCausalLM",
        {**DECODER, "tie_word_embeddings": False},
        chosen=(17, 40),
    ),
    DecoderCase(
        "gpt2_sequence",
        "gpt2",
        "GPT2ForSequenceClassification",
        {**GPT2, **LABELS, "pad_token_id": 0},
    ),
    DecoderCase("opt_model", "opt", "OPTModel", OPT, pad_id=1, logits=None),
    DecoderCase(
        "opt_350m_sequence",
        "opt",
        "OPTForSequenceClassification",
        {**OPT_350M, **LABELS},
        pad_id=1,
    ),
    DecoderCase("opt_chosen", "opt", "OPTForCausalLM", OPT, pad_id=1, chosen=(17, 40)),
)
GENERATOR_CASES: tuple[GeneratorCase, ...] = (
    GeneratorCase("gpt2", "gpt2", "GPT2LMHeadModel", GPT2),
    GeneratorCase("opt_125m", "opt", "OPTForCausalLM", OPT, pad_id=1),
    GeneratorCase("opt_350m", "opt", "OPTForCausalLM", OPT_350M, pad_id=1),
    GeneratorCase("opt_plain", "opt", "OPTForCausalLM", OPT_PLAIN, pad_id=1),
)
