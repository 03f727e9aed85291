"""Stand-ins passed through constructors: a runner without arrays, a tokenizer without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.types.step import (
    Runner,
    RunnerInfo,
    SampledToken,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
    TokenLogprob,
)
from mlx_parallm.types.token_limit import TokenLimit

EOS = 256


def make_info(**changes: Any) -> RunnerInfo:
    """Return a small model's facts; bytes and one EOS token are its vocabulary."""
    facts: dict[str, Any] = {
        "path": "packed",
        "vocab_size": 257,
        "max_model_len": 256,
        "num_blocks": 64,
        "block_size": 4,
        "kv_bytes": 0,
        "weight_bytes": 0,
        "has_state": False,
        "attention_backend": "fake",
        "dtype": "float32",
    }
    return RunnerInfo(**(facts | changes))


class ByteTokenizer:
    """One token per UTF-8 byte; 256 ends."""

    vocab_size = 257
    eos_ids = frozenset({EOS})
    bos_id: int | None = None
    has_chat_template = True
    chat_template = None
    takes_tools = True
    special_tokens = frozenset[str]()

    def token_id(self, token: str) -> int | None:
        return None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in token_ids if i < EOS).decode(errors="replace")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)

    def template_variables(
        self, variables: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {**(defaults or {}), **variables}

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **options))

    def token_string(self, token_id: int) -> str:
        return self.decode([token_id])

    def vocabulary_string(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b""

    def detokenizer(self, **options: object) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """Emits whole characters only."""

    def __init__(self) -> None:
        self._held = b""

    def add(self, token_id: int) -> str:
        self._held += bytes([token_id]) if token_id < EOS else b""
        try:
            text = self._held.decode()
        except UnicodeDecodeError:
            return ""
        self._held = b""
        return text

    def flush(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


class FakeRunner(Runner):
    """Chooses tokens by a function of (sequence, position); can be made to fail."""

    def __init__(
        self,
        script: Callable[[ScheduledSequence], int],
        *,
        info: RunnerInfo | None = None,
        before: Callable[[ScheduledBatch], None] = lambda batch: None,
        ending: Callable[[ScheduledBatch], None] = lambda batch: None,
    ) -> None:
        self.info = info or make_info()
        self.batches: list[ScheduledBatch] = []
        self._script = script
        self._before = before
        self._ending = ending

    def submit(self, batch: ScheduledBatch) -> FakeStep:
        self.batches.append(batch)
        self._before(batch)
        tokens = [
            SampledToken(seq_id=row.seq_id, token_id=token, logprob=TokenLogprob(token, -0.5))
            for row in batch.sequences
            if row.sample is not None
            for token in [self._script(row)]
        ]
        return FakeStep(StepOutput(tokens=tuple(tokens)), lambda: self._ending(batch))


class FakeStep:
    """A step that has ended, or raises when it is waited for."""

    def __init__(self, output: StepOutput, ending: Callable[[], None]) -> None:
        self._output = output
        self._ending = ending

    def wait(self) -> StepOutput:
        self._ending()
        return self._output


def spell(text: str) -> Callable[[ScheduledSequence], int]:
    """Return a script that writes ``text``, then EOS."""
    ids = [*text.encode(), EOS]

    def script(row: ScheduledSequence) -> int:
        assert row.sample is not None
        # Tokens after the end are those of a row that ran ahead in vain.
        return (ids + ids)[row.sample.position - len(row.sample.prompt_ids)]

    return script
