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
from mlx_parallm.types.pooling import PoolingInput, Task

# MAX_LOGITS: most logits of an answer, whose text has some 20 bytes for each.
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

    async def inputs(self) -> tuple[PoolingInput, ...]:
        """Return what the model reads.

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
        num_words = len(self.words.ids) or self.model.info.vocab_size
        if body.return_logits and num_words * sum(len(each.places) for each in inputs) > MAX_LOGITS:
            raise InvalidRequestError(
                f"return_logits asks for more than {MAX_LOGITS} numbers.", param="return_logits"
            )
        return inputs

    def answer(self, text: PoolingInput, result: np.ndarray) -> dict[str, Any]:
        """Return what is told of a text."""
        logits = result if text.task == "mlm" else None
        # The result of ``mlm_top`` is what ``fillings`` takes.
        logprobs = result if logits is None else log_softmax(result)
        if self.words.ids and not text.candidates and logits is not None:
            text = replace(text, candidates=self.words.ids)
            chosen = np.array(self.words.ids)
            logits, logprobs = logits[:, chosen], logprobs[:, chosen]
        masks: list[dict[str, Any]] = [{"position": place} for place in text.places]
        for row, mask in enumerate(masks):
            if self.words.ids:
                mask["words"] = self._words(logprobs[row])
            if self.body.label_words is not None:
                mask["label"] = self.words.labels[int(logprobs[row].argmax())]
            if self.body.return_logits and logits is not None:
                mask["logits"] = logits[row].tolist()
        if self.body.return_top_k:
            best = fillings(text, logprobs, self.body.return_top_k, self.model)
            for mask, tokens in zip(masks, best, strict=True):
                mask["top_k"] = tokens
        return {"num_tokens": len(text.token_ids), "predictions": masks}

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
    """Return the body of the answer."""
    names = body.request_ids or [None] * len(texts)
    return {
        "object": "list",
        "data": [
            {"object": "mlm", "index": index, "request_id": name, **text}
            for index, (name, text) in enumerate(zip(names, texts, strict=True))
        ],
        "model": model,
        "usage": prompt_usage(sum(text["num_tokens"] for text in texts)),
        "warnings": list(warnings),
    }
