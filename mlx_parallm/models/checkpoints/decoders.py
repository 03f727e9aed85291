"""What a config says about a decoder that is read as an encoder: its head and its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlx_parallm.models.checkpoints.rope_fields import rope_fields
from mlx_parallm.types.pooling import Task

#: What is made of a decoder's hidden states: nothing but vectors; logits of labels by the
#: checkpoint's own layer; or one logit by which of two tokens would come next.
DecoderHead = Literal["none", "score", "choice"]

#: Decoders under names of their own, whose weights and config are another architecture's.
ALIASES = {"llama_bidirec": "llama"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """How a decoder's checkpoint is read as an encoder.

    Attributes:
        head: what is made of its hidden states.
        tasks: what it can do; the first is what it was made for.
        chosen: of ``choice``: ids of the token that raises the logit and of the one that lowers it;
            without the second it is the first's own logit.
    """

    head: DecoderHead = "none"
    tasks: tuple[Task, ...] = ("embed", "token_embed")
    chosen: tuple[int, ...] = ()


def architecture(config: Mapping[str, Any]) -> str:
    """The class that a checkpoint was saved from; empty where its config names none."""
    found = config.get("architectures")
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, str) else ""


def reads_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether every token attends to all others, as transformers and NVIDIA's models have it."""
    return (
        _value(config, "is_causal") is False
        or splits_window(config)
        or "Bidirectional" in architecture(config)
        or config.get("model_type") in ALIASES
    )


def splits_window(config: Mapping[str, Any]) -> bool:
    """Whether attention is Gemma's to both sides: half of a window's tokens are at either side."""
    return _value(config, "use_bidirectional_attention") in (True, "all")


def readable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for mlx_lm in place of those that it does not read."""
    found = rope_fields(config)
    if "tie_word_embeddings" not in config:
        # What it means is for the LM head alone; some of mlx_lm's models must be told.
        found["tie_word_embeddings"] = False
    model_type = str(config.get("model_type"))
    if model_type in ALIASES:
        found["model_type"] = ALIASES[model_type]
    layers = config.get("layer_types") or ()
    if "sliding_window_pattern" not in config and "full_attention" in layers:
        found["sliding_window_pattern"] = layers.index("full_attention") + 1
    return found


def _value(config: Mapping[str, Any], name: str) -> Any:
    return config.get(name, (config.get("text_config") or {}).get(name))
