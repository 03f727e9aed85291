"""Events of a task of an encoder-decoder as Hugging Face's objects and TGI's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from mlx_parallm.api.turns.logprobs import TokenNames
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import Chunk, Sample, SampledAnswer
from mlx_parallm.api.turns.sources import num_prompt_tokens
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent

# SPACES: what transformers' ``clean_up_tokenization`` replaces, in its order.
SPACES = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)


def finished_text(text: str) -> str:
    """Return a text without spaces before punctuation and in contractions."""
    for before, after in SPACES:
        text = text.replace(before, after)
    return text


class TaskAnswer(SampledAnswer):
    """Builds the answer to one source or several."""

    def __init__(
        self,
        admitted: Admitted,
        prompts: Sequence[ImagePrompt],
        *,
        n: int,
        keys: Sequence[str],
        is_list: bool,
        has_details: bool,
        finish: Callable[[str], str],
    ) -> None:
        """Begin without text.

        Args:
            admitted: the request.
            prompts: one for each source.
            n: texts of each source.
            keys: the names of a text in the answer.
            is_list: whether the sources came as a list.
            has_details: whether the tokens of texts are wanted.
            finish: returns the text of the answer.
        """
        num_tokens = [num_prompt_tokens(prompt) for prompt in prompts]
        super().__init__(n, len(prompts), num_prompt_tokens=sum(num_tokens))
        self._names = TokenNames(admitted.model.tokenizer, as_ids=False)
        self._keys = keys
        self._is_list = is_list
        self._has_details = has_details
        self._finish = finish

    @override
    def whole(self) -> Any:
        """Return a list of texts for a source; for several a text each, or such lists."""
        texts = [self._object(sample) for sample in self.samples]
        if not self._is_list or self.n == 1:
            return texts
        return [texts[begin : begin + self.n] for begin in range(0, len(texts), self.n)]

    @override
    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Return TGI's object of each token; the last has the whole text too."""
        self.add(prompt, event)
        if isinstance(event, PromptEvent):
            return []
        sample = self.samples[event.index]
        piece = Sample()
        piece.add(event)
        tokens = self._tokens(piece) or [self._token(0, 0.0)]
        first = len(sample.token_ids) - len(tokens) + 1
        # Text comes with the last of its tokens.
        chunks: list[Chunk] = [
            {"index": first + place, "token": token | {"text": ""}, "generated_text": None}
            for place, token in enumerate(tokens)
        ]
        chunks[-1]["token"]["text"] = event.text
        if event.finish_reason is not None:
            details = self._ending(sample) | {"input_length": self.usage.prompt_tokens}
            chunks[-1] |= {"generated_text": self._finish(sample.text), "details": details}
        return chunks

    @override
    def failure(self, error: Chunk) -> list[Chunk]:
        return [{"error": error["error"]["message"], "error_type": "generation"}]

    def _object(self, sample: Sample) -> dict[str, Any]:
        result: dict[str, Any] = dict.fromkeys(self._keys, self._finish(sample.text))
        if self._has_details:
            details = {"prefill": [], "tokens": self._tokens(sample)}
            result["details"] = self._ending(sample) | details
        return result

    def _ending(self, sample: Sample) -> dict[str, Any]:
        is_end = sample.finish_reason == FinishReason.STOP
        reason = "eos_token" if sample.stop_reason is None else "stop_sequence"
        return {
            "finish_reason": reason if is_end else "length",
            "generated_tokens": len(sample.token_ids),
            "seed": None,
        }

    def _tokens(self, sample: Sample) -> list[dict[str, Any]]:
        return [self._token(entry.token_id, entry.logprob) for entry in sample.logprobs]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        entry = self._names.entry(token_id, logprob)
        return {
            "id": token_id,
            "text": entry["token"],
            "logprob": logprob,
            "special": "special" in entry,
        }
