"""The methods of ``LLM`` for a pooling model: embed, classify, score, reward, fill masks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np

from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.hf.tasks import filled
from mlx_parallm.api.pooling.inputs.encode import (
    ANY_TEXT,
    Reading,
    Role,
    named_prompt,
    single_inputs,
)
from mlx_parallm.api.pooling.scores.pairs import Pairs, score_pairs, scoring_model
from mlx_parallm.api.pooling.scores.rewards import reward_model, reward_of
from mlx_parallm.api.pooling.vectors.arrays import activated, check_dimensions, finished
from mlx_parallm.api.pooling.vectors.routes import POOLING_TASKS
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.offline.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, Task

T = TypeVar("T")
Prompt = str | Sequence[int]
Make = Callable[[np.ndarray, PoolingModel], T]


class OfflinePooling:
    """One pooling model, with the paths that the routes of the server take."""

    def __init__(self, model: PoolingModel, engine: OfflineEngine) -> None:
        self._model = model
        self._engine = engine
        self._ids = count()

    def embed(
        self,
        prompts: Sequence[Prompt],
        truncate: int | None,
        dimensions: int | None,
        adapter: str | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return what ``/v1/embeddings`` gives."""
        info = self._model.info
        check_dimensions(dimensions, self._model)

        def make(vector: np.ndarray, _: PoolingModel) -> EmbeddingOutput:
            (row,) = finished([vector], "embed", info, dimensions=dimensions)
            return EmbeddingOutput(embedding=row.tolist())

        role = Role(prompt=named_prompt(info, None))
        return self._each(prompts, "embed", make, truncate=truncate, role=role, adapter=adapter)

    def classify(
        self, prompts: Sequence[Prompt], truncate: int | None, adapter: str | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return what ``/v1/classify`` gives."""

        def make(logits: np.ndarray, model: PoolingModel) -> ClassificationOutput:
            probs = activated(logits, model.info.problem_type)
            return ClassificationOutput(probs=probs.tolist())

        return self._each(prompts, "classify", make, truncate=truncate, adapter=adapter)

    def reward(
        self, prompts: Sequence[Prompt], truncate: int | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what ``/v1/rewards/score`` gives, as arrays of one number."""

        def choose(client: PoolingClient) -> PoolingModel:
            return reward_model(client, self._model.names[0], "classify")

        def make(logits: np.ndarray, _: PoolingModel) -> PoolingOutput:
            return PoolingOutput(data=np.array([reward_of(logits, sigmoid=False)], np.float32))

        return self._each(prompts, "classify", make, truncate=truncate, choose=choose)

    def encode(
        self, prompts: Sequence[Prompt], task: Task | None, truncate: int | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what ``/v1/pooling`` gives; ``task`` is the model's main one by default."""
        own = self._model.info.tasks
        tasks: list[Task] = [each for each in own if each in POOLING_TASKS]
        chosen: Task = task or (tasks[0] if tasks else "embed")

        def make(result: np.ndarray, model: PoolingModel) -> PoolingOutput:
            return PoolingOutput(data=finished([result], chosen, model.info)[0])

        return self._each(prompts, chosen, make, truncate=truncate)

    def score(
        self, data_1: Sequence[str], data_2: Sequence[str], truncate: int | None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return what ``/v1/score`` gives for pairs."""
        if not data_2 or len(data_1) not in (1, len(data_2)):
            raise InvalidRequestError(
                f"data_1 has {len(data_1)} texts and data_2 {len(data_2)}: "
                "data_1 needs one, or as many as data_2.",
                param="data_1",
            )
        pairs = Pairs(data_1, data_2, ("data_1", "data_2"), truncate)

        async def work(client: PoolingClient) -> list[float]:
            model = scoring_model(client, self._model.names[0])
            return (await score_pairs(self._call(client, model), pairs)).values

        return [
            PoolingRequestOutput(request_id=self._new_id(), outputs=ScoringOutput(score=score))
            for score in self._run(work)
        ]

    def fill_mask(
        self,
        prompts: Sequence[str],
        top_k: int,
        targets: Sequence[str] | None,
        adapter: str | None = None,
    ) -> list[Any]:
        """Return the answer of Hugging Face's fill-mask pipeline for each prompt."""
        if top_k < 1:
            raise InvalidRequestError(f"top_k is {top_k}; it must be at least 1.", param="top_k")

        async def work(client: PoolingClient) -> list[Any]:
            call = self._call(client, client.get(adapter or self._model.names[0], "mlm"))
            reading = Reading(param="prompts")
            answers, _ = await filled(call, prompts, reading, top_k=top_k, targets=targets)
            return answers

        return self._run(work) if prompts else []

    def _each(
        self,
        prompts: Sequence[Prompt],
        task: Task,
        make: Make[T],
        *,
        truncate: int | None,
        role: Role = ANY_TEXT,
        adapter: str | None = None,
        choose: Callable[[PoolingClient], PoolingModel] | None = None,
    ) -> list[PoolingRequestOutput[T]]:
        """Return what ``make`` makes of each prompt's result."""
        if not prompts:
            return []
        if len({isinstance(prompt, str) for prompt in prompts}) > 1:
            raise InvalidRequestError(
                "prompts must be all texts, or all token ids.", param="prompts"
            )
        reading = Reading(truncate=truncate, param="prompts")
        name = adapter or self._model.names[0]

        async def work(client: PoolingClient) -> tuple[Sequence[PoolingInput], list[T]]:
            model = client.get(name, task) if choose is None else choose(client)
            inputs = await single_inputs(prompts, model, task, reading, role=role)
            call = self._call(client, model)
            outputs, _ = await call.written(inputs, lambda _, result: make(result, model))
            return inputs, outputs

        inputs, outputs = self._run(work)
        return [
            PoolingRequestOutput(
                request_id=self._new_id(), outputs=output, prompt_token_ids=read.token_ids
            )
            for read, output in zip(inputs, outputs, strict=True)
        ]

    def _run(self, work: Callable[[PoolingClient], Coroutine[Any, Any, T]]) -> T:
        return self._engine.call(lambda client: work(POOLING.client(client)))

    def _call(self, client: PoolingClient, model: PoolingModel) -> ModelCall:
        return ModelCall(client=client, model=model, work_id=self._new_id())

    def _new_id(self) -> str:
        return f"offline-{next(self._ids)}"
