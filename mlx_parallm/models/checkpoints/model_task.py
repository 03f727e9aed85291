"""What a model is served for: what its files say, or what the user does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlx_parallm.config import ModelTask
from mlx_parallm.models.checkpoints.decoders import DecoderPlan, architecture
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.pooling import Task

#: The endings of class names and what their checkpoints are for, the first that fits; vLLM's rule.
_ENDINGS: tuple[tuple[str, ModelTask], ...] = (
    ("LMHeadModel", "generate"),
    ("ChatModel", "generate"),
    ("RewardModel", "reward"),
    ("ForRewardModeling", "reward"),
    ("ForSequenceClassification", "classify"),
    ("ForTokenClassification", "token_classify"),
    ("ForTextEncoding", "embed"),
    ("Model", "embed"),
)
_VECTORS: tuple[Task, ...] = ("embed", "token_embed")
_HEADS: Mapping[ModelTask, tuple[Task, ...]] = {
    "classify": ("classify", "token_classify"),
    "token_classify": ("token_classify", "classify"),
    "score": ("classify", "token_classify"),
    "reward": ("classify", "token_classify"),
    "embed": ("embed",),
    "token_embed": ("token_embed",),
}


def decoder_task(config: Mapping[str, Any], modules: Collection[str]) -> ModelTask:
    """What a decoder's checkpoint was made for.

    Args:
        config: its config.json.
        modules: kinds of the modules of sentence-transformers that its folder has.
    """
    if "LogitScore" in modules:
        return "score"
    if "Pooling" in modules or "Dense" in modules:
        return "embed"
    return _class_task(config)


def decoder_plan(
    task: ModelTask, config: Mapping[str, Any], chosen: tuple[int, ...] = ()
) -> DecoderPlan:
    """How a decoder is read for a task other than ``generate``.

    Args:
        task: what it is served for.
        config: its config.json.
        chosen: ids of the tokens that it scores by, where its checkpoint has no head.
    """
    if task == "embed":
        return DecoderPlan(tasks=_VECTORS)
    if task == "token_embed":
        return DecoderPlan(tasks=("token_embed", "embed"))
    tasks = _HEADS[task]
    if task == "reward" and "Process" in architecture(config):
        tasks = _HEADS["token_classify"]
    if chosen:
        return DecoderPlan(head="choice", tasks=("classify", *_VECTORS), chosen=chosen)
    return DecoderPlan(head="score", tasks=(*tasks, *_VECTORS))


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether the class of a decoder's checkpoint has a layer that gives logits of labels."""
    return _class_task(config) not in ("generate", "embed")


def tasks_for(task: ModelTask, tasks: tuple[Task, ...], name: str) -> tuple[Task, ...]:
    """What a model that reads can do, what it is served for first.

    Raises:
        ConfigError: it cannot do that.
    """
    able = _HEADS.get(task, ())
    first = next((one for one in able if one in tasks), None)
    if first is None:
        raise ConfigError(f"--task {task}: {name} can only do {', '.join(tasks)}.")
    return tuple(sorted(tasks, key=lambda one: one != first))


def _class_task(config: Mapping[str, Any]) -> ModelTask:
    name = architecture(config)
    for ending, task in _ENDINGS:
        if name.endswith(ending):
            return task
    return "generate"
