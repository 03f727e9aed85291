"""The layer that scores, brought by an adapter of a decoder that is read as an encoder."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.encode import Task
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.runner.adapted_layers import unfit
from mlx_parallm.runner.decoder_loading import HEAD_NAMES, scoring_layers, split_head
from mlx_parallm.runner.decoder_model import DecoderModel
from mlx_parallm.runner.own_heads import MadeHead, Saved


class ScoreHeads:
    """Implements ``own_heads.HeadMaker``."""

    tasks: tuple[Task, ...] = ("classify", "token_classify")

    def __init__(self, model: DecoderModel, dtype: mx.Dtype) -> None:
        """``dtype`` is what heads compute in."""
        self._model = model
        self._dtype = dtype

    def make(self, saved: Saved, *, param: str) -> MadeHead:
        """See ``HeadMaker``."""
        arrays = {name: tensor.to_mlx().astype(self._dtype) for name, tensor in saved.items()}
        others, head = split_head(arrays)
        if others:
            name = sorted(others)[0]
            names = ", ".join(HEAD_NAMES)
            raise unfit(f"modules_to_save may bring {names}; {name[:100]} is none of them", param)
        for name, array in head.items():
            if name.rpartition(".")[2] not in ("weight", "bias") or array.ndim > 2:
                raise unfit(f"{name[:100]} is no tensor of a linear layer", param)
        try:
            score = scoring_layers(head, {})
        except ModelLoadError as problem:
            raise unfit(f"modules_to_save: {problem}", param) from None
        for number, layer in enumerate(score if isinstance(score, list) else [score]):
            begin = f"{number}." if isinstance(score, list) else ""
            own = [name for name in head if name.startswith(begin)]
            # Activations have none.
            if own:
                layer.update({name.removeprefix(begin): head[name] for name in own})
        return MadeHead(self._model.with_score(score), {"score"})
