"""Sessions that start from a served adapter: which fields of the body its files decide."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Sequence

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.api.mezo.schema import CreateSession, Trainable
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import Train
from mlx_parallm.training.start import StartParameters
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import FirstFactors
from mlx_parallm.worker.ops import ReadAdapter


async def warm_start(
    body: CreateSession, model: str, adapters: Sequence[AdapterInfo], train: Train
) -> tuple[CreateSession, StartParameters | None]:
    """Return the body with what its adapter decides, and the parameters to start from.

    A body that names no adapter stays as it is.

    Args:
        body: the request.
        model: the first name of the model.
        adapters: those that are loaded.
        train: runs ops.

    Raises:
        InvalidRequestError: the model has no such adapter, it cannot be trained, or fields differ
            from it.
    """
    if body.adapter is None:
        return body, None
    content = next(
        (each.digest for each in adapters if (each.name, each.model) == (body.adapter, model)), None
    )
    if content is None:
        raise InvalidRequestError(
            f"{model} has no loaded adapter {body.adapter[:100]!r}.", param="adapter"
        )
    op = ReadAdapter(model=model, content=content)
    name = f"adapter-{uuid.uuid4().hex}"
    request = TrainingRequest(request_id=name, model=model, session=name, ops=(op,))
    (weights,) = await train(request)
    start = StartParameters.of_adapter(weights)
    return body.model_copy(update={"trainable": _settings(body.trainable, weights)}), start


def _settings(trainable: Trainable, weights: AdapterWeights) -> Trainable:
    """Return the settings of a session that trains an adapter on.

    Raises:
        InvalidRequestError: given ones differ from the adapter's.
    """
    scale = next(iter(weights.modules.values())).scale
    alpha = scale * weights.rank
    fields = trainable.model_fields_set
    differs = {
        "rank": trainable.rank != weights.rank,
        "alpha": not math.isclose(trainable.alpha, alpha, rel_tol=1e-6),
        "targets": not _are_ends(trainable.targets, weights.modules),
        "init": trainable.init is not FirstFactors.RANDOM,
        "head": bool(weights.saved) and not trainable.head,
    }
    conflicts = [field for field, is_other in differs.items() if field in fields and is_other]
    if conflicts:
        names = ", ".join(f"trainable.{field}" for field in conflicts)
        raise InvalidRequestError(
            f"{names}: the adapter has other ones; leave them out.",
            param=f"trainable.{conflicts[0]}",
        )
    head = trainable.head or bool(weights.saved)
    return trainable.model_copy(update={"rank": weights.rank, "alpha": alpha, "head": head})


def _are_ends(targets: Sequence[str], paths: Collection[str]) -> bool:
    """True if each path ends in a target, and each target is the end of a path."""
    ends = {target: {path for path in paths if path.endswith(f".{target}")} for target in targets}
    return not targets or (all(ends.values()) and set().union(*ends.values()) == set(paths))
