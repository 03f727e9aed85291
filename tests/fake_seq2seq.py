"""An encoder-decoder without a model: its texts are bytes, and its engine writes a script."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

from mlx_parallm.generation.admission import check_length
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.tokenizer.seq2seq.languages import LanguageTokens, NoLanguages
from mlx_parallm.tokenizer.seq2seq.rules import Seq2SeqRules, TaskDefaults
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.types import model_input
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import InputKind, ModelInput
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.token_limit import TokenLimit
from tests.fake_engine import FakeEngine
from tests.fakes import EOS, ByteTokenizer, make_info

NAME = "org/translator"
START, ENGLISH, GERMAN, BANNED = 1, 2, 3, 4
MAX_SOURCE_LEN = 64
RULES = Seq2SeqRules(
    model_type="bart",
    decoder_start_id=START,
    forced_eos_ids=(EOS,),
    banned_ids=(BANNED,),
    defaults=TaskDefaults(
        num_beams=4, length_penalty=2.0, no_repeat_ngram_size=3, min_length=3, max_length=40
    ),
    tasks={"summarization": TaskDefaults(prefix="summarize: ", num_beams=2, max_length=30)},
)
LANGUAGES = LanguageTokens(ids={"en": ENGLISH, "de": GERMAN}, eos_id=EOS, source="en")


class SourceBytes(ByteTokenizer):
    """Bytes, and a token that ends a source."""

    has_chat_template = False

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        ids = [*text.encode(), *([EOS] if add_special_tokens else [])]
        if limit is not None:
            limit.check(len(ids))
        return ids

    def render_chat(self, messages: Any, **options: Any) -> str:
        if not self.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or give a chat_template.",
                param="messages",
            )
        return super().render_chat(messages, **options)


class TemplatedBytes(SourceBytes):
    """Such bytes with a chat template."""

    has_chat_template = True


def seq2seq_model(
    *, templated: bool = False, has_languages: bool = True, **facts: Any
) -> GenerationModel:
    """Return an encoder-decoder; ``facts`` are other ones of its runner."""
    tokenizer: Any = TemplatedBytes() if templated else SourceBytes()
    languages = LANGUAGES if has_languages else NoLanguages()
    info = {"max_source_len": MAX_SOURCE_LEN, "input_kinds": frozenset({InputKind.SOURCE})}
    return GenerationModel(
        names=(NAME,),
        root="/models/translator",
        created=1,
        tokenizer=tokenizer,
        info=make_info(**info | facts),
        seq2seq=Seq2SeqTokenizer(tokenizer, tokenizer, RULES, languages),
    )


class FakeSeq2Seq(FakeEngine):
    """An engine of encoder-decoders, or of other models before one."""

    def __init__(self, *models: GenerationModel) -> None:
        super().__init__()
        self._models = models or (seq2seq_model(),)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        prompt_len, params = len(request.prompt_ids), request.params
        check_length(prompt_len, params.max_tokens, self.get_model(request.model).max_model_len)
        return await super().submit(request)

    def models(self) -> tuple[GenerationModel, ...]:
        return self._models

    def get_model(self, name: str) -> GenerationModel:
        for model in self._models:
            self._model = model
            if name in model.names:
                return super().get_model(name)
        return super().get_model(name)


def decoder_model() -> GenerationModel:
    """Return a model without an encoder."""
    return replace(FakeEngine().first_model(), names=("org/decoder",))


def taken(engine: FakeEngine) -> GenerateRequest:
    """Return the next request that the engine got."""
    try:
        return engine.submitted.get_nowait()
    except queue.Empty:
        raise AssertionError("the engine got no request") from None


def source_ids(source: ModelInput) -> list[int]:
    """Return the tokens of a source."""
    return [*model_input.source_ids(source)]
