"""An adapter of an encoder as a model that reads."""

from __future__ import annotations

from dataclasses import replace

from mlx_parallm.engine.adapter_names import NamedAdapter
from mlx_parallm.engine.encoder_interface import EncoderModel
from mlx_parallm.types.pooling import LABEL_TASKS, EncoderInfo, OwnHead


def adapted_model(model: EncoderModel, adapter: NamedAdapter) -> EncoderModel | None:
    """What requests of an adapter are answered by; None until it is loaded."""
    info = adapter.info
    if info is None:
        return None
    return replace(
        model,
        names=(adapter.name,),
        root=adapter.source or adapter.name,
        created=info.created,
        info=model.info if info.head is None else with_head(model.info, info.head),
        parent=adapter.base,
        head=info.head,
    )


def with_head(info: EncoderInfo, head: OwnHead) -> EncoderInfo:
    """What is known of a model with another head than its own.

    Its labels have the names of the model's where there are as many, else their numbers.
    """
    if not head.num_labels:
        return info
    others = (one for one in info.tasks if one not in LABEL_TASKS)
    is_alike = set(head.tasks) == LABEL_TASKS.intersection(info.tasks)
    tasks = info.tasks if is_alike else (*head.tasks, *others)
    if len(info.labels) == head.num_labels:
        return replace(info, tasks=tasks)
    labels = tuple(f"LABEL_{number}" for number in range(head.num_labels))
    return replace(info, tasks=tasks, labels=labels, problem_type=None, scores_are_logits=False)
