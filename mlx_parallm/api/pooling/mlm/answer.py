"""From the body of ``POST /v1/mlm`` to inputs of a masked LM, and from results to the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_parallm.api.pooling.answer import prompt_usage
from mlx_parallm.api.pooling.mlm.inputs import Candidates, candidates_of, masked_inputs
from mlx_parallm.api.pooling.mlm.schema import MlmRequest
from mlx_parallm.api.pooling.vectors.arrays import log_softmax
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, Task

# MAX_LOGITS: most logits of an answer, whose text has some 20 bytes for each.
MAX_LOGITS = 4_000_000


def fillings(
    text: PoolingInput, results: np.ndarray, top_k: int, model: PoolingModel
) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens at each mask of an input, best first.

    Args:
        text: an input whose places are its masks.
        results: the result of ``mlm_top``, or log-probabilities of its candidates or of the whole
            vocabulary, float32 ``[masks, candidates or vocabulary]``.
        top_k: how many tokens of each mask.
        model: has the vocabulary.
    """
    return [
        [
            filling(text, place, token, logprob, model)
            for token, logprob in _likeliest(text, row, top_k)
        ]
        for place, row in zip(text.places, results, strict=True)
    ]


def _likeliest(text: PoolingInput, row: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """Return tokens with their log-probabilities, best first; of equals the earlier one first."""
    if text.task == "mlm_top":
        ids, logprobs = row[:, :top_k].tolist()
        return [(int(token), logprob) for token, logprob in zip(ids, logprobs, strict=True)]
    order = np.argsort(-row, kind="stable")[:top_k].tolist()
    return [(text.candidates[at] if text.candidates else at, float(row[at])) for at in order]


def filling(
    text: PoolingInput, place: int, token: int, logprob: float, model: PoolingModel
) -> dict[str, Any]:
    """Return a token at a mask, and the text with it.

    A text's special tokens are left out unless they show its other masks.
    """
    tokenizer = model.tokenizer
    ids = [*text.token_ids[:place], token, *text.token_ids[place + 1 :]]
    ids = [number for number in ids if number != tokenizer.pad_id]
    return {
        "score": float(np.exp(logprob)),
        "token": token,
        "token_str": tokenizer.decode([token]),
        "sequence": tokenizer.decode(ids, skip_special_tokens=len(text.places) == 1),
    }


@dataclass(frozen=True, slots=True)
class MaskQuestion:
    """The question of a request about each mask.

    Label words are compared with each other, so that only their logits are computed. The scores of
    targets are shares of the whole vocabulary.

    Attributes:
        body: the request.
        model: the masked LM.
        words: the body's words, as tokens.
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
        param = "targets" if body.label_words is None else "label_words"
        return cls(body, model, await candidates_of(body.words, model, param))

    async def inputs(self) -> tuple[PoolingInput, ...]:
        """Return the inputs of the model.

        Raises:
            InvalidRequestError: see ``masked_inputs``; or the answer would be too long.
        """
        body = self.body
        # Targets are shares of the vocabulary, all of whose logits are computed then.
        all_logits = body.return_logits and body.label_words is None
        words = () if all_logits else self.words.ids
        task: Task = "mlm_logprobs" if words else "mlm_top"
        if all_logits or body.label_words is not None:
            task = "mlm"
        inputs = await masked_inputs(
            body.sources, self.model, task, body.source_reading, words, top_k=body.return_top_k
        )
        num_words = len(self.words.ids) or self.model.info.vocab_size
        if body.return_logits and num_words * sum(len(each.places) for each in inputs) > MAX_LOGITS:
            raise InvalidRequestError(
                f"return_logits asks for more than {MAX_LOGITS} numbers.", param="return_logits"
            )
        return inputs

    def answer(self, text: PoolingInput, result: np.ndarray) -> dict[str, Any]:
        """Return the answer about a text."""
        logits = result if text.task == "mlm" else None
        # ``fillings`` reads the results of ``mlm_top`` as they are.
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
