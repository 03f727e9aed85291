"""The towers by the ``model_type`` of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.gemma import GEMMA
from mlx_parallm.models.vision.gemma4 import GEMMA4
from mlx_parallm.models.vision.idefics3 import IDEFICS3
from mlx_parallm.models.vision.internvl import INTERNVL
from mlx_parallm.models.vision.llava import LLAVA, LLAVA_NEXT
from mlx_parallm.models.vision.pixtral import PIXTRAL
from mlx_parallm.models.vision.qwen import QWEN
from mlx_parallm.models.vision.qwen3 import QWEN3

#: ``TOWERS``: the families of each ``model_type``; the first that knows a config has its tower.
TOWERS: Mapping[str, tuple[TowerFamily, ...]] = {
    "gemma3": (GEMMA,),
    "gemma4": (GEMMA4,),
    "idefics3": (IDEFICS3,),
    "internvl": (INTERNVL,),
    "internvl_chat": (INTERNVL,),
    "llava": (LLAVA, PIXTRAL),
    "llava_next": (LLAVA_NEXT,),
    "mistral3": (PIXTRAL,),
    "qwen2_5_vl": (QWEN,),
    "qwen2_vl": (QWEN,),
    "qwen3_5": (QWEN3,),
    "qwen3_5_moe": (QWEN3,),
    "qwen3_vl": (QWEN3,),
    "qwen3_vl_moe": (QWEN3,),
    "smolvlm": (IDEFICS3,),
}
#: ``TOWER_PARTS``: how names of towers' weights begin in checkpoints, besides "model.".
TOWER_PARTS = frozenset(
    prefix.partition(".")[0]
    for families in TOWERS.values()
    for family in families
    for prefix in family.parts
)


def family_of(config: Mapping[str, Any]) -> TowerFamily | None:
    """Return the family of a checkpoint's tower; None if it has none, or one that is not known."""
    return next((family for family in _families(config) if family.unlike(config) is None), None)


def why_no_family(config: Mapping[str, Any]) -> str | None:
    """Return why the tower of a checkpoint is not known; None if it is, or there is none."""
    if not isinstance(config.get("vision_config"), dict) or family_of(config) is not None:
        return None
    families = _families(config)
    if not families:
        return f"towers of the model_type {config.get('model_type')} are not read"
    return "its config.json has " + " and ".join(str(family.unlike(config)) for family in families)


def _families(config: Mapping[str, Any]) -> Sequence[TowerFamily]:
    has_tower = isinstance(config.get("vision_config"), dict)
    return TOWERS.get(str(config.get("model_type")), ()) if has_tower else ()
