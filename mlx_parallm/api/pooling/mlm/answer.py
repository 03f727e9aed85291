"""Between the body of ``POST /v1/mlm`` and what a masked LM reads and gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_parallm.api.pooling.activation import log_softmax
from mlx_parallm.api.pooling.answer import prompt_usage
from mlx_parallm.api.pooling.mlm.fill_mask import fillings, kept_top_k
from mlx_parallm.api.pooling.mlm.inputs import Candidates, candidates_of, masked_inputs
from mlx_parallm.api.pooling.mlm.schema import MlmRequest
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, Task

# Of an answer, which has some 20 bytes for each.
MAX_LOGITS = 4_000_000


@dataclass(frozen=True, slots=True)
class MaskQuestion:
    """What a request asks of each mask.

    Label words are compared with each other, so that only their logits are computed. The scores of
    targets are shares of the whole vocabulary.

    Attributes:
        body: asks.
        model: answers.
        words: those of the body.
    """

    body: MlmRequest
    model: PoolingModel
    words: Candidates

    @classmethod
    async def of(cls, body: MlmRequest, model: PoolingModel) -> MaskQuestion:
        """Read the words of a request.

        Raises:
            InvalidRequestError: see ``candidates_of``.
        """
        if body.words is None:
            return cls(body, model, Candidates())
        param = "targets" if body.label_words is None else "label_words"
        return cls(body, model, await candidates_of(body.words, model, param))

    async def inputs(self) -> tuple[EncodeInput, ...]:
        """What the model reads.

        Raises:
            InvalidRequestError: see ``masked_inputs``; the answer would be too long.
        """
        body = self.body
        # Targets are shares of the vocabulary, whose logits are then all there to be told.
        all_logits = body.return_logits and body.label_words is None
        task: Task = "mlm" if all_logits or body.label_words is not None else "mlm_logprobs"
        if task == "mlm_logprobs" and not self.words.ids:
            task = "mlm_top"
        inputs = await masked_inputs(
            body.given,
            self.model,
            task,
            body.given_reading,
            () if all_logits else self.words.ids,
            top_k=kept_top_k(body.return_top_k, self.model) if task == "mlm_top" else 0,
        )
        told = len(self.words.ids) or self.model.info.vocab_size
        if body.return_logits and told * sum(len(one.places) for one in inputs) > MAX_LOGITS:
            raise InvalidRequestError(
                f"return_logits asks for more than {MAX_LOGITS} numbers.", param="return_logits"
            )
        return inputs

    def answer(self, one: EncodeInput, result: np.ndarray) -> dict[str, Any]:
        """What is told of a text."""
        logits = result if one.task == "mlm" else None
        # Of ``mlm_top`` it is what ``fillings`` takes.
        logprobs = result if logits is None else log_softmax(result)
        if self.words.ids and not one.candidates and logits is not None:
            one = replace(one, candidates=self.words.ids)
            chosen = np.array(self.words.ids)
            logits, logprobs = logits[:, chosen], logprobs[:, chosen]
        found: list[dict[str, Any]] = [{"position": place} for place in one.places]
        for row, told in enumerate(found):
            if self.words.ids:
                told["words"] = self._words(logprobs[row])
            if self.body.label_words is not None:
                told["label"] = self.words.labels[int(logprobs[row].argmax())]
            if self.body.return_logits and logits is not None:
                told["logits"] = logits[row].tolist()
        if self.body.return_top_k:
            best = fillings(one, logprobs, self.body.return_top_k, self.model)
            for told, tokens in zip(found, best, strict=True):
                told["top_k"] = tokens
        return {"num_tokens": len(one.token_ids), "predictions": found}

    def _words(self, logprobs: np.ndarray) -> list[dict[str, Any]]:
        return [
            {"label": label, "token": token, "score": float(np.exp(logprob)), "logprob": logprob}
            for label, token, logprob in zip(
                self.words.labels, self.words.ids, logprobs.tolist(), strict=True
            )
        ]


def mlm_answer(
    texts: list[dict[str, Any]], body: MlmRequest, model: str, warnings: tuple[str, ...]
) -> dict[str, Any]:
    """The body of the answer."""
    names = body.request_ids or [None] * len(texts)
    return {
        "object": "list",
        "data": [
            {"object": "mlm", "index": index, "request_id": name, **one}
            for index, (name, one) in enumerate(zip(names, texts, strict=True))
        ],
        "model": model,
        "usage": prompt_usage(sum(text["num_tokens"] for text in texts)),
        "warnings": list(warnings),
    }
