"""Readers of a config that decide the head and attention of a decoder used as a pooling model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlx_parallm.models.checkpoints import rope_fields
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.pooling import Task

#: ``DecoderHead``: "none" gives only vectors; "score" gives logits of labels by the checkpoint's
#: own layer; "choice" gives one logit, by which of two tokens would come next.
DecoderHead = Literal["none", "score", "choice"]

#: ``ALIASES``: model types whose weights and config are those of another architecture.
ALIASES = {"llama_bidirec": "llama"}
#: ``TIED``: model types whose LM head is tied if the config does not say.
TIED = frozenset({"opt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """Layout of a decoder's checkpoint that serves as a pooling model.

    Attributes:
        head: the head over its hidden states.
        tasks: the tasks that it can do; the first is its main one.
        chosen: for ``choice``: the ids of the tokens that raise and lower the logit; if there is
            only one id, the result is its own logit.
    """

    head: DecoderHead = "none"
    tasks: tuple[Task, ...] = ("embed", "token_embed")
    chosen: tuple[int, ...] = ()


def architecture(config: Mapping[str, Any]) -> str:
    """Return the class that a checkpoint was saved from; empty if its config names none."""
    names = config.get("architectures")
    first = names[0] if is_list(names) and names else names
    return first if isinstance(first, str) else ""


def reads_both_ways(config: Mapping[str, Any]) -> bool:
    """True if every token attends to all others, by the fields of transformers and NVIDIA."""
    return (
        _value(config, "is_causal") is False
        or splits_window(config)
        or "Bidirectional" in architecture(config)
        or config.get("model_type") in ALIASES
    )


def splits_window(config: Mapping[str, Any]) -> bool:
    """True if attention is Gemma's bidirectional one, with half of a window on either side."""
    return _value(config, "use_bidirectional_attention") in (True, "all")


def readable_config(
    config: Mapping[str, Any], *, max_model_len: int | None = None
) -> dict[str, Any]:
    """Return a config with fields that mlx_lm reads, in place of those that it does not know.

    ``max_model_len`` is as in ``rope_fields.readable_config``.
    """
    fields = rope_fields.readable_config(config, max_model_len=max_model_len)
    model_type = str(config.get("model_type"))
    if "tie_word_embeddings" not in config and model_type not in TIED:
        # The field concerns only the LM head, but some of mlx_lm's models require it.
        fields["tie_word_embeddings"] = False
    if model_type in ALIASES:
        fields["model_type"] = ALIASES[model_type]
    return fields


def _value(config: Mapping[str, Any], name: str) -> Any:
    text_config: Mapping[str, Any] = config.get("text_config") or {}
    return config.get(name, text_config.get(name))
