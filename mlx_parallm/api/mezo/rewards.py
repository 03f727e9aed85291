"""Rewards of what the perturbed copies of a session generate: rollouts of this server.

A rollout is what a client would ask for (``api.rl.routes``), so the samples are those of the
continuous batch, and verifiers and reward models are asked as they are for clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from starlette.types import ASGIApp

from mlx_parallm.api.files.service import LineSender
from mlx_parallm.api.mezo.prompts import encoded_prompt
from mlx_parallm.api.mezo.request import trainable
from mlx_parallm.api.mezo.rows import Row
from mlx_parallm.api.mezo.schema import CreateSession, Reward
from mlx_parallm.api.rl.judges import check_url
from mlx_parallm.api.rl.routes import routes as rollouts
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.training.records import Example, SessionConfig
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ParallmError,
    PausedError,
    RequestAbortedError,
    RequestLostError,
)
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.training import ChoiceInput

# TEMPORARY: codes of errors after which the same rollout may succeed.
TEMPORARY: Mapping[str, Callable[[str], ParallmError]] = {
    "rate_limit_exceeded": OverloadedError,
    "model_loading": OverloadedError,
    "paused": lambda _: PausedError(),
    "engine_dead": EngineDeadError,
    "request_lost": RequestLostError,
    "request_aborted": RequestAbortedError,
    "out_of_memory": RequestAbortedError,
}
# NOT_FOUND: the copy is not there yet on an engine that was started anew, if ``model`` names it.
NOT_FOUND = "model_not_found"
ABORTED = "abort"


class RolloutRewards:
    """Asks an application for rollouts. Implements ``training.judged_steps.Rewards``."""

    def __init__(self, app: ASGIApp) -> None:
        """``app`` is the application that has the sessions."""
        self._send = LineSender(app, max_waiting=None)
        (self._path, *_), *_ = (route.paths for route in rollouts.all)

    async def __call__(
        self, config: SessionConfig, name: str, examples: Sequence[Example], seed: int
    ) -> list[float]:
        """Return the mean reward of the samples of each example.

        Raises:
            ConflictError: a sample got no reward, or the rollout failed and would again.
            OverloadedError, PausedError, EngineDeadError, RequestAbortedError: it may succeed
                later. A RequestLostError may have killed its engine.
        """
        objective = Reward.model_validate(config.objective)
        answer = await self._send(
            config.id, self._path, _body(objective, name, examples, seed), f"{name}-rollout"
        )
        if answer.status_code != 200:
            error = answer.body.get("error") if is_object(answer.body) else None
            raise _problem(error, f"The rollout was answered {answer.status_code}")
        body = cast("dict[str, Any]", answer.body)
        return [_mean(group["samples"], objective, group["error"]) for group in body["groups"]]


def _body(objective: Reward, name: str, examples: Sequence[Example], seed: int) -> dict[str, Any]:
    """Return the body of a rollout."""
    prompts: list[dict[str, Any]] = []
    for example in examples:
        assert isinstance(example.input, ChoiceInput)
        prompt: dict[str, Any] = {"token_ids": example.input.token_ids}
        if example.metadata is not None:
            prompt["metadata"] = example.metadata
        prompts.append(prompt)
    judge = objective.model_dump(mode="json", include={"verifier", "reward_model"})
    return {
        **objective.sampling,
        **{name: value for name, value in judge.items() if value is not None},
        "model": name,
        "prompts": prompts,
        "n": objective.n,
        # Seeds have 63 bits, and samples have seeds behind this one.
        "seed": seed % (1 << 62),
        "return_prompt_token_ids": False,
    }


def _problem(error: Any, what: str) -> ParallmError:
    """Return what to raise for the error object of a rollout, or of one of its prompts."""
    fields: Mapping[str, Any] = error if is_object(error) else {}
    text, code = f"{what}: {fields.get('message')}", fields.get("code")
    if code == NOT_FOUND and fields.get("param") == "model":
        return RequestAbortedError(text)
    return TEMPORARY.get(str(code), ConflictError)(text)


def _mean(
    samples: Sequence[Mapping[str, Any]], objective: Reward, error: Mapping[str, Any] | None
) -> float:
    """Return the mean reward of a group."""
    if error is not None:
        raise _problem(error, "The samples of a prompt failed")
    if any(sample["finish_reason"] == ABORTED for sample in samples):
        raise RequestAbortedError("Samples were aborted.")
    key = "reward_error" if objective.verifier is None else "verifier_error"
    for sample in samples:
        if sample["reward"] is None:
            raise ConflictError(f"A sample has no reward: {sample[key]}")
    return sum(sample["reward"] for sample in samples) / len(samples)


def check_reward(
    body: CreateSession, objective: Reward, engine: EngineClient, config: ServerConfig
) -> GenerationModel:
    """Return the model of a session whose samples are judged.

    Raises:
        ModelNotFoundError, ModelLoadingError: there is no such model or reward model (yet).
        InvalidRequestError: the model does not generate or is an adapter, nobody judges or two do,
            or the server may not ask this verifier.
    """
    model = trainable(GENERATION.client(engine), body.model)
    if model.parent is not None:
        raise InvalidRequestError(f"{body.model} is an adapter; name its model.", param="model")
    if (objective.verifier is None) == (objective.reward_model is None):
        raise InvalidRequestError(
            "The objective reward has a verifier or a reward_model.", param="objective"
        )
    if objective.verifier is not None:
        _at("objective.verifier.url", check_url, objective.verifier.url, config.verifier_urls)
    if objective.reward_model is not None:
        name = objective.reward_model.model
        _at("objective.reward_model.model", POOLING.client(engine).get, name, "classify")
    return model


def _at(param: str, check: Any, *arguments: Any) -> None:
    """Let what a check raises name a field of this body."""
    try:
        check(*arguments)
    except InvalidRequestError as problem:
        problem.param = param
        raise


def prompts_of(
    rows: Sequence[Row], objective: Reward, model: GenerationModel, param: str
) -> list[Example]:
    """Return rows as prompts whose samples are judged.

    Raises:
        InvalidRequestError: a row has a label or a completion, or is too long; names it.
    """
    examples: list[Example] = []
    for number, row in enumerate(rows):
        place = row.place(number, param)
        if row.label is not None or row.completion is not None:
            raise InvalidRequestError(
                f"{place} has a label or a completion; the objective reward has neither.",
                param=param,
            )
        prompt = encoded_prompt(row, objective.template, model, place, param)
        if len(prompt.token_ids) >= model.max_model_len:
            raise InvalidRequestError(f"{place} leaves no room for an answer.", param=param)
        examples.append(Example(prompt, 0, row.metadata))
    return examples
