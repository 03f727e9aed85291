"""The choice of the classes that implement a decoder: this package's, or mlx_lm's.

They read the weights, and have the windows of attention, that transformers' models have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import RotatingKVCache

from mlx_parallm.models import opt
from mlx_parallm.models.extended_decoders import EXTENDED_DECODERS
from mlx_parallm.models.family_weights import FAMILY_WEIGHTS
from mlx_parallm.models.seq2seq import bart, t5, whisper
from mlx_parallm.models.text_halves import TEXT_HALVES
from mlx_parallm.models.vision.checkpoint import with_tower
from mlx_parallm.models.vision.registry import family_of
from mlx_parallm.types.errors import ModelLoadError

#: ``OWN_DECODERS``: the classes of architectures that mlx_lm lacks, by ``model_type``.
OWN_DECODERS: Mapping[str, tuple[type, type]] = {
    **TEXT_HALVES,
    "opt": (opt.Model, opt.ModelArgs),
}
#: ``ENCODER_DECODERS``: the same of models whose decoder attends to an encoder's output.
ENCODER_DECODERS: Mapping[str, tuple[type, type]] = {
    **dict.fromkeys(bart.FAMILIES, (bart.Model, bart.ModelArgs)),
    **dict.fromkeys(t5.FAMILIES, (t5.Model, t5.ModelArgs)),
    "whisper": (whisper.Model, whisper.ModelArgs),
}
#: ``TRUNKS``: the names of trunks in mlx_lm's models.
TRUNKS = ("model", "backbone", "transformer")
#: ``WINDOWED``: families of which all layers have the window that the config names.
#: mlx_lm's classes make the mask from the first layer's cache.
WINDOWED = frozenset({"ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"})


def decoder_classes(config: dict[str, Any]) -> tuple[type, type]:
    """Return the classes of a decoder and of its fields in ``config.json``.

    Raises:
        ValueError: neither this package nor mlx_lm has them.
    """
    own = {**OWN_DECODERS, **EXTENDED_DECODERS, **ENCODER_DECODERS}.get(
        str(config.get("model_type"))
    )
    model, args = own or mlx_lm_utils._get_classes(config)
    model = readable_decoder(model, config)
    family = family_of(config)
    return (model if family is None else with_tower(model, config, family)), args


def readable_decoder(model_class: type, config: Mapping[str, Any]) -> type:
    """Return a class that reads what transformers 5 saves, and has the config's window."""
    model_type = str(config.get("model_type"))
    if model_type in FAMILY_WEIGHTS:
        model_class = _renaming(model_class, model_type)
    window = window_of(config)
    return model_class if window is None else _windowed(model_class, window)


def window_of(config: Mapping[str, Any]) -> int | None:
    """Return the window of all layers, in tokens; None if attention reaches all tokens."""
    text: Mapping[str, Any] = config.get("text_config") or config
    window = text.get("sliding_window")
    if text.get("model_type") not in WINDOWED or window is None:
        return None
    longest = text.get("max_position_embeddings")
    return None if longest is not None and longest <= window else int(window)


def _renaming(model_class: type, model_type: str) -> type:
    rename = FAMILY_WEIGHTS[model_type]

    class SavedModel(model_class):
        """A model of mlx_lm for weights as transformers 5 names them too."""

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return the weights of a checkpoint by this model's names."""
            parent: Any = super()
            weights = rename(weights)
            return parent.sanitize(weights) if hasattr(parent, "sanitize") else weights

    return SavedModel


def _windowed(model_class: type, window: int) -> type:
    class WindowedModel(model_class):
        """A model of mlx_lm whose layers all attend to the latest tokens."""

        def make_cache(self) -> list[Any]:
            """Return a cache for each layer."""
            layers: list[Any] = self.layers
            return [RotatingKVCache(max_size=window) for _ in layers]

    return WindowedModel


def trunk_of(model: Any) -> Any:
    """Return the module that computes hidden states up to the last norm.

    Raises:
        ModelLoadError: this model has it elsewhere.
    """
    owner = getattr(model, "language_model", model)
    trunks = (getattr(owner, name, None) for name in TRUNKS)
    trunk = next((trunk for trunk in trunks if isinstance(trunk, nn.Module)), None)
    if trunk is None:
        raise ModelLoadError("the hidden states of this architecture cannot be reached.")
    return trunk
