"""The choice of a model's task, by its files or by the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.models.checkpoints.decoders import DecoderPlan, architecture, reads_both_ways
from mlx_parallm.models.checkpoints.encoder_decoders import is_encoder_decoder
from mlx_parallm.models.checkpoints.encoders import ENCODER_TYPES
from mlx_parallm.models.checkpoints.sentence_transformers import (
    module_kinds,
    read_fields,
    read_json,
    transformer_folder,
)
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.pooling import Task

#: ``_ENDINGS``: endings of class names and their tasks; the first match counts, as in vLLM.
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
    """Return the task that a decoder's checkpoint was made for.

    Args:
        config: its config.json.
        modules: kinds of the modules of sentence-transformers that its folder has.
    """
    if is_encoder_decoder(config):
        return "generate"
    if "LogitScore" in modules:
        return "score"
    if "Pooling" in modules or "Dense" in modules:
        return "embed"
    return _class_task(config)


def decoder_plan(
    task: ModelTask, config: Mapping[str, Any], chosen: tuple[int, ...] = ()
) -> DecoderPlan:
    """Return how a decoder is used for a task other than ``generate``.

    Args:
        task: the task that it is served for.
        config: its config.json.
        chosen: ids of the tokens whose logits are the score, if its checkpoint has no head.

    Raises:
        ConfigError: it is an encoder-decoder.
    """
    if is_encoder_decoder(config):
        raise ConfigError(f"--task {task}: {config['model_type']} can only generate.")
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
    """True if the class of a decoder's checkpoint has a layer that gives logits of labels."""
    return _class_task(config) not in ("generate", "embed")


def tasks_for(task: ModelTask, tasks: tuple[Task, ...], name: str) -> tuple[Task, ...]:
    """Return the tasks of a pooling model, beginning with the one that it is served for.

    Raises:
        ConfigError: the model cannot do ``task``.
    """
    able = _HEADS.get(task, ())
    first = next((candidate for candidate in able if candidate in tasks), None)
    if first is None:
        raise ConfigError(f"--task {task}: {name} can only do {', '.join(tasks)}.")
    return tuple(sorted(tasks, key=lambda candidate: candidate != first))


def _class_task(config: Mapping[str, Any]) -> ModelTask:
    name = architecture(config)
    for ending, task in _ENDINGS:
        if name.endswith(ending):
            return task
    return "generate"


def task_of(config: ModelConfig, path: Path) -> ModelTask:
    """Return the task of a folder with a decoder: the configured one, else the files' own.

    Raises:
    ModelLoadError: a file of it cannot be read.
    """
    if config.task != "auto":
        return config.task
    model_config = read_json(path / "config.json")
    # A config that is no object is reported when the model is loaded.
    return decoder_task(model_config, module_kinds(path)) if is_object(model_config) else "generate"


def reads_on(path: Path) -> bool:
    """True if tokens of a folder's model attend only to earlier tokens."""
    model_config = read_fields(transformer_folder(path) / "config.json")
    return model_config.get("model_type") not in ENCODER_TYPES and not reads_both_ways(model_config)
