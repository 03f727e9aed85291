"""``system_fingerprint``: what of a server changes the results of equal requests."""

from __future__ import annotations

import hashlib
import json

from mlx_parallm import __version__
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import RequestClient

LENGTH = 12


def system_fingerprint(engine: RequestClient, model: GenerationModel) -> str:
    """Return a short digest of a model's weights as they are now, and of how it is served.

    It stays the same over restarts. It changes with an update of the weights or of the adapter, or
    their label, with the version of this program and with settings that change results. A request
    that runs during an update tells the one that it began with; ``weight_versions`` say more.
    """
    info = model.info
    base = engine.control.version(model.parent or model.names[0])
    digests = (
        adapter.digest for adapter in engine.control.adapters() if adapter.name == model.adapter
    )
    facts = [
        __version__,
        model.revision,
        [base.content, base.label],
        None if model.adapter is None else next(digests, ""),
        model.tokenizer.chat_template,
        dict(model.chat_template_kwargs),
        engine.config.logprobs_mode,
        [info.path, info.attention_backend, info.dtype, info.kv_cache_dtype, info.max_model_len],
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:LENGTH]}"
