"""Adapters that PEFT made of golden generators (scripts/golden_generator_adapters.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.path_choice import choose_path
from mlx_parallm.worker.generation.row_selection import vocab_size_of
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from tests.golden_weights import golden_adapter_weight, golden_weight

GOLDEN = Path(__file__).parent / "golden" / "generator_adapters"
PREFIX = "base_model.model."


def generator_adapter_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def read_generator_adapter(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def saved_tensors(golden: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors that PEFT saved, with the weights that it repeated."""
    shapes, copies = golden["tensors"], golden["copies"]
    tensors = {name: golden_adapter_weight(name, shape) for name, shape in shapes.items()}
    if golden["adapter_config"].get("ensure_weight_tying"):
        table, head = f"{PREFIX}model.embed_tokens.lora_embedding_", f"{PREFIX}lm_head.lora_"
        tensors[f"{head}A.weight"] = tensors[f"{table}B"].T.copy()
        tensors[f"{head}B.weight"] = tensors[f"{table}A"].T.copy()
    weights = golden["weights"]
    return tensors | {name: golden_weight(of, weights[of]) for name, of in copies.items()}


def adapter_of(golden: dict[str, Any], **changed: np.ndarray) -> AdapterWeights:
    tensors = {name: HostTensor(array) for name, array in saved_tensors(golden).items()}
    tensors |= {name: HostTensor(array) for name, array in changed.items()}
    return read_adapter(golden["adapter_config"], tensors, param="adapter")


class AdaptedGenerator:
    """A generator whose rows may have adapters."""

    def __init__(self, folder: Path) -> None:
        self.loaded: LoadedModel = load_model(ModelConfig(), folder)
        model = self.loaded.model
        self.path = at_once(choose_path)(
            model,
            probe_layout(model),
            ReferenceAttention(4),
            vocab_size=vocab_size_of(self.loaded),
            num_blocks=32,
            block_size=4,
            dtype="float32",
        ).path
        self.layers = AdaptedLayers(
            model, mx.float32, self.path.adapters, config=self.loaded.config
        )
        self.store = AdapterStore(self.layers)

    def place(self, adapter: AdapterWeights) -> None:
        """Put an adapter into slot 1."""
        self.store.add(adapter.digest, adapter)
        self.store.place({1: adapter.digest})

    def last_logits(self, ids: list[int], slot: int) -> np.ndarray:
        """Return the logits of the last token, by the adapter in a slot; 0 is none."""
        sequence = ScheduledSequence(
            seq_id=0,
            slot=0,
            start=0,
            token_ids=tuple(ids),
            block_table=tuple(range(-(-len(ids) // 4))),
            adapter_slot=slot,
        )
        return np.array(self.path.logits([sequence], token_array([sequence]), [len(ids) - 1])[0])
