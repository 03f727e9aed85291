"""``GET /v1/rl/capabilities``: what a trainer can rely on here."""

from __future__ import annotations

from types import MappingProxyType

from mlx_parallm.api.http.dependencies import ConfigDep, EngineDep, MaxWaitingDep
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.rewards.request import gives_rewards
from mlx_parallm.api.rl.capabilities.schema import RLCapabilities, RLModel, Tolerance
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.request import LOGPROBS_MODES

routes = Routes(RL, short=True)
# The bound is what tests hold on every execution path. The rest is what
# `python -m benchmarks.logprob_agreement` measured with the embedded model. A CPU computes every
# row of a bfloat16 product by itself, and tells the same numbers in every batch; GPUs do not.
TOLERANCES = MappingProxyType(
    {
        "float32": Tolerance(bound=1e-4, median=0.0, p99=9.6e-6, most=2.9e-5, device="cpu"),
        "bfloat16": Tolerance(
            bound=None, median=3.9e-6, p99=0.076, most=0.22, device="NVIDIA H100"
        ),
    }
)


@routes.get("/v1/rl/capabilities")
async def rl_capabilities(
    engine: EngineDep, config: ConfigDep, max_waiting: MaxWaitingDep
) -> RLCapabilities:
    """Models and adapters with their weights' versions, exactness by dtype, modes and limits."""
    control = engine.control
    models = [_model(model, control.version(model.names[0]).label) for model in engine.models()]
    reading = list(engine.pooling.models())
    for info in control.adapters():
        status = engine.pooling.find(info.name)
        if status is None:
            models.append(_model(engine.get_model(info.name), info.version))
        elif status.model is not None:
            reading.append(status.model)
    return RLCapabilities(
        object="rl.capabilities",
        models=models,
        logprobs_modes=list(LOGPROBS_MODES),
        default_logprobs_mode=engine.config.logprobs_mode,
        max_logprobs=config.max_logprobs,
        max_samples=max_waiting or None,
        pause_modes=[mode.value for mode in PauseMode],
        is_paused=control.is_paused,
        has_verifier_urls=bool(config.verifier_urls),
        reward_models=[
            model.names[0] for model in reading if gives_rewards(model.info, "classify")
        ],
    )


def _model(model: GenerationModel, version: str) -> RLModel:
    return RLModel(
        model=model.names[0],
        parent=model.parent,
        weight_version=version,
        dtype=model.info.dtype,
        max_model_len=model.info.max_model_len,
        vocab_size=model.info.vocab_size,
        tolerance=TOLERANCES.get(model.info.dtype),
    )
