"""The KV of a token, as config.json gives it before weights are there."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.models.checkpoints.decoder_sizes import kv_bytes_per_token

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 128 * 1024),
        (LLAMA | {"torch_dtype": "float32"}, 256 * 1024),
        (LLAMA | {"head_dim": 64}, 64 * 1024),
        (LLAMA | {"layer_types": ["linear_attention", "full_attention"] * 16}, 64 * 1024),
        ({"text_config": LLAMA, "model_type": "llava"}, 128 * 1024),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 36 * 1024),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "multi_query": True}, 3 * 1024),
        (DEEPSEEK_V3, 61 * 576 * 2),
        ({}, None),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, None),
        ({"num_hidden_layers": "many", "num_attention_heads": 4}, None),
        (LLAMA | {"num_attention_heads": 0}, None),
        (LLAMA | {"num_attention_heads": -1}, None),
        (LLAMA | {"layer_types": [[], {}, None, 1]}, 0),
        (LLAMA | {"layer_types": "full_attention"}, 128 * 1024),
        ({"text_config": "llama"}, None),
        ({"text_config": [1]}, None),
        (LLAMA | {"head_dim": 0}, 128 * 1024),
    ],
)
def test_a_tokens_kv(config: dict[str, Any], expected: int | None) -> None:
    assert kv_bytes_per_token(config) == expected
