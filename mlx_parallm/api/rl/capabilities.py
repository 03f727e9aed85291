"""``GET /v1/rl/capabilities``: what a trainer can rely on here."""

from __future__ import annotations

from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field

from mlx_parallm.api.http.dependencies import ConfigDep, EngineDep, MaxWaitingDep
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.scores.rewards import gives_rewards
from mlx_parallm.engine.adapter_users import AdapterHead
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.types.request import LOGPROBS_MODES


class Tolerance(BaseModel):
    """Distance of log-probabilities returned by sampling from scores of the same tokens.

    Absolute differences; the quantiles are of what was measured with the embedded model.
    """

    bound: float | None = Field(description="Tested: never more. Null: no bound is promised.")
    median: float = Field(description="Half of the tokens differ less.")
    p99: float = Field(description="99 of 100 tokens differ less.")
    most: float = Field(description="The largest difference that was seen.")
    device: str = Field(description="Where the quantiles were measured; elsewhere they are others.")


class RLModel(BaseModel):
    """A served model or adapter as a trainer sees it."""

    model_config = ConfigDict(protected_namespaces=())

    model: str = Field(description="The name that requests use.")
    parent: str | None = Field(description="The model that an adapter belongs to.")
    weight_version: str = Field(description="Label of its weights now.")
    dtype: str = Field(description="The dtype it computes in.")
    max_model_len: int = Field(description="Tokens of prompt and output together, at most.")
    vocab_size: int = Field(description="Token ids are below this.")
    has_value_head: bool = Field(description="Whether answers can have value_estimates.")
    tolerance: Tolerance | None = Field(description="For its dtype; null where none was measured.")


class RLCapabilities(BaseModel):
    """The features of the routes for trainers on this server."""

    object: str = Field("rl.capabilities", description="Always rl.capabilities.")
    models: list[RLModel] = Field(description="Models and adapters.")
    logprobs_modes: list[str] = Field(description="Values of logprobs_mode.")
    default_logprobs_mode: str = Field(description="Of requests that name none.")
    max_logprobs: int = Field(description="Most alternatives per token; -1 is no limit.")
    max_samples: int | None = Field(description="Prompts times n of a request; null: no limit.")
    pause_modes: list[str] = Field(description="Values of mode of /pause.")
    is_paused: bool = Field(description="Whether nothing is generated now.")
    has_verifier_urls: bool = Field(description="Whether rollouts may have a verifier.")
    reward_models: list[str] = Field(description="Values of model of a rollout's reward_model.")


routes = Routes(RL, short=True)
# The bound is what tests hold on every execution path. The rest is what
# `python -m benchmarks.logprob_agreement` measured with the embedded model. A CPU computes every
# row of a bfloat16 product by itself, and gives the same numbers in every batch; GPUs do not.
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
    models = [
        _model(model, control.version(model.names[0]).label)
        for model in GENERATION.client(engine).models()
        if not model.takes_sources
    ]
    reading = list(POOLING.client(engine).models())
    for info in control.adapters():
        status = POOLING.client(engine).find(info.name)
        if status is None:
            model = GENERATION.client(engine).get_model(info.name)
            models += [] if model.takes_sources else [_model(model, info.version, info.head)]
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


def _model(model: GenerationModel, version: str, head: AdapterHead | None = None) -> RLModel:
    """Return what is known of a model, or of an adapter with the head that it brings."""
    return RLModel(
        model=model.names[0],
        parent=model.parent,
        weight_version=version,
        dtype=model.info.dtype,
        max_model_len=model.info.max_model_len,
        vocab_size=model.info.vocab_size,
        has_value_head=model.info.has_value_head or head is not None,
        tolerance=TOLERANCES.get(model.info.dtype),
    )
