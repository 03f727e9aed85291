"""mlx_lm's results for a sample whose weights changed: each span by the weights that it names."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from loadtests.swap_clients import PROMPTS
from loadtests.swap_samples import Output, Sample, version_number
from loadtests.swap_uploads import SCALE, tensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER


class Replay:
    """The embedded model in float32, with one adapter at a time fused into its weights.

    A request that runs during an update keeps its KV. So a span's tokens are those that its version
    gives behind the KV of the spans before it, each computed with its own version.
    """

    def __init__(self) -> None:
        model, _ = load_model(DEMO_FOLDER)
        self._model: Any = dequantize_model(model)
        self._model.set_dtype(mx.float32)
        modules = dict(self._model.named_modules())
        paths = {name.rpartition(".")[0] for name in tensors(0)}
        self._modules = {path: modules[path] for path in paths}
        self._weights = {path: module.weight for path, module in self._modules.items()}
        # The fused weights by the adapter's seed; they take a few MB each.
        self._fused: dict[int | None, dict[str, mx.array]] = {}

    def error(self, sample: Sample, seeds: dict[int, int]) -> float:
        """Return the largest error of a log-probability of the sample.

        Args:
            sample: its spans partition its tokens.
            seeds: seeds of the tensors, by version of its adapter.
        """
        output = sample.output
        logits = mx.concatenate(self.logits(sample.case, output, seeds))
        expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected = expected[mx.arange(len(output.token_ids)), mx.array(list(output.token_ids))]
        return cast("float", mx.abs(expected - mx.array(list(output.logprobs))).max().item())

    def logits(self, case: str, output: Output, seeds: dict[int, int]) -> list[mx.array]:
        """Return, for each span, the logits of its tokens, ``[tokens, vocab]``."""
        cache = make_prompt_cache(self._model)
        unread, by_span = list(PROMPTS[case]), []
        for span in output.spans:
            number = version_number(span.version)
            self._fuse(None if number is None else seeds[number])
            tokens = list(output.token_ids[span.start : span.end])
            logits = self._model(mx.array([unread + tokens[:-1]]), cache=cache)
            by_span.append(logits[0, len(unread) - 1 :])
            unread = tokens[-1:]
        return by_span

    def _fuse(self, seed: int | None) -> None:
        """Have the weights of an adapter; None is the base."""
        if seed not in self._fused:
            parts = {} if seed is None else tensors(seed)
            self._fused[seed] = dict(self._weights)
            for path in self._weights if seed is not None else ():
                a, b = (mx.array(parts[f"{path}.{name}"]) for name in ("lora_a", "lora_b"))
                self._fused[seed][path] = self._weights[path] + SCALE * (a @ b).T
        for path, module in self._modules.items():
            module.weight = self._fused[seed][path]
