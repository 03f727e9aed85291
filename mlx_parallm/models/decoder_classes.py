"""The choice of the classes that implement a decoder: this package's, or mlx_lm's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mlx_lm import utils as mlx_lm_utils

from mlx_parallm.models import (
    falcon_h1,
    gemma2,
    glm,
    gpt2,
    gpt_oss,
    idefics3,
    internvl,
    llava_next,
    opt,
)
from mlx_parallm.models.readable_decoders import readable_decoder
from mlx_parallm.models.vision.registry import family_of
from mlx_parallm.models.vision.with_tower import with_tower

#: ``OWN_DECODERS``: the modules for architectures that mlx_lm lacks, by ``model_type``.
OWN_DECODERS: dict[str, ModuleType] = {
    "idefics3": idefics3,
    "internvl": internvl,
    "internvl_chat": internvl,
    "llava_next": llava_next,
    "opt": opt,
    "smolvlm": idefics3,
}
#: ``EXTENDED_DECODERS``: modules that extend those of mlx_lm.
EXTENDED_DECODERS: dict[str, ModuleType] = {
    "falcon_h1": falcon_h1,
    "gemma2": gemma2,
    "glm": glm,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
}


def decoder_classes(config: dict[str, Any]) -> tuple[type, type]:
    """Return the classes of a decoder and of its fields in ``config.json``.

    Raises:
        ValueError: neither this package nor mlx_lm has them.
    """
    module = (OWN_DECODERS | EXTENDED_DECODERS).get(str(config.get("model_type")))
    if module is None:
        model, args = mlx_lm_utils._get_classes(config)
    else:
        model, args = module.Model, module.ModelArgs
    model = readable_decoder(model, config)
    family = family_of(config)
    return (model if family is None else with_tower(model, config, family)), args
