"""The tokens and rules of a speech model, from its folder (arXiv:2212.04356, figure 1).

They are read from ``generation_config.json``, and from the vocabulary where an older file lacks
them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlx_parallm.models.checkpoints.encoder_decoders import SPEECH_TYPES
from mlx_parallm.tokenizer.seq2seq.fields import Fields
from mlx_parallm.tokenizer.speech.languages import CODES, LANGUAGE_NAMES
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.request import TimestampRule

logger = logging.getLogger(__name__)

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
TASKS = (TRANSCRIBE, TRANSLATE)
# AUTO: the name of a language that is to be detected, as whisper.cpp's clients have it.
AUTO = "auto"
# LANGUAGE: a token that names a language.
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
# ENGLISH_SIZE: the vocabulary of models of English, which have tokens of languages all the same.
ENGLISH_SIZE = 51864
# LATEST: steps of 0.02 s of the first timestamp, if a file does not say.
LATEST = 50
# NO_TOKEN: stands for no token in lists of tokens.
NO_TOKEN = -1
# MAX_LENGTH, NUM_MELS: sizes that a config leaves out.
MAX_LENGTH, NUM_MELS = 448, 80
# NAMES: tokens as vocabularies have them; the second name of no speech is that of older ones.
NO_TIMESTAMPS, PREVIOUS, START, END = (
    "<|notimestamps|>",
    "<|startofprev|>",
    "<|startoftranscript|>",
    "<|endoftext|>",
)
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
GENERATION = "generation_config.json"
# FILES_NEEDED: what an error says of a folder that lacks them.
FILES_NEEDED = (
    "Folders without a tokenizer of their own need tokenizer.json and generation_config.json of "
    "the model that they were made from."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """The beginning of a speech model's output, and the tokens that it may have.

    Attributes:
        start_id: the first token of all output.
        end_id: the last one.
        no_timestamps_id: ends the prompt of output without timestamps.
        no_speech_id: its probability behind the start is that of no speech; None: unknown.
        previous_id: stands before the text that came before; None if there is no such token.
        languages: the tokens of languages by code; empty for a model of one language.
        tasks: the tokens of tasks by name; likewise.
        banned_ids: tokens that are never chosen.
        begin_banned_ids: tokens that are not chosen first.
        max_initial: most steps of the first timestamp.
        vocab_size: number of tokens, timestamps included.
        max_length: most tokens of a window's prompt and output.
        num_mels: numbers of a frame of features.
    """

    start_id: int
    end_id: int
    no_timestamps_id: int
    no_speech_id: int | None = None
    previous_id: int | None = None
    languages: Mapping[str, int] = field(default_factory=dict[str, int])
    tasks: Mapping[str, int] = field(default_factory=dict[str, int])
    banned_ids: tuple[int, ...] = ()
    begin_banned_ids: tuple[int, ...] = ()
    max_initial: int = LATEST
    vocab_size: int = 0
    max_length: int = MAX_LENGTH
    num_mels: int = NUM_MELS

    @property
    def timestamp_begin(self) -> int:
        """The token of the timestamp 0."""
        return self.no_timestamps_id + 1

    @property
    def timestamps(self) -> TimestampRule:
        """The rule of timestamps in output."""
        return TimestampRule(
            begin_id=self.timestamp_begin,
            end_id=self.end_id,
            off_id=self.no_timestamps_id,
            max_initial=self.max_initial,
        )

    @property
    def most_previous(self) -> int:
        """The most tokens of the text before a window: half of what the decoder reads."""
        return self.max_length // 2 - 1

    def within(self, max_length: int) -> SpeechRules:
        """Return the rules of windows whose prompt and output have at most so many tokens."""
        return replace(self, max_length=min(self.max_length, max_length))

    def language(self, name: str) -> str | None:
        """Return the code of a language by its code, its English name or a tag (BCP 47).

        Tags have regions and scripts behind the language, as ``pt-BR`` and ``zh_Hant`` do.

        Returns:
            The code; None for ``AUTO``.

        Raises:
            InvalidRequestError: the model does not know it.
        """
        primary = name.strip().lower().replace("_", "-").partition("-")[0]
        if primary == AUTO:
            return None
        code = primary if primary in self.languages else CODES.get(primary, primary)
        if code in self.languages:
            return code
        if not self.languages:
            if code in ("en", ""):
                return "en"
            raise InvalidRequestError("This model knows English alone.", param="language")
        raise InvalidRequestError(
            f"language {name[:40]!r} is none of this model's: {', '.join(sorted(self.languages))}.",
            param="language",
        )

    def check_task(self, task: str) -> None:
        """Raise InvalidRequestError if the model cannot do a task."""
        if task == TRANSLATE and TRANSLATE not in self.tasks:
            raise InvalidRequestError(
                "This model transcribes English alone, and translates nothing.", param="model"
            )

    def prompt(
        self,
        code: str | None,
        task: str,
        *,
        has_timestamps: bool,
        previous: Sequence[int] = (),
    ) -> list[int]:
        """Return the tokens that a window's output goes on from.

        Args:
            code: the language; None to end where the language would come.
            task: one of ``TASKS``.
            has_timestamps: whether output has timestamps.
            previous: the text before, of which the end is read.
        """
        tokens: list[int] = []
        if previous and self.previous_id is not None:
            tokens = [self.previous_id, *previous[-self.most_previous :]]
        tokens.append(self.start_id)
        if self.languages:
            if code is None:
                return tokens
            tokens += [self.languages[code], self.tasks[task]]
        if not has_timestamps:
            tokens.append(self.no_timestamps_id)
        return tokens


def language_name(code: str) -> str:
    """Return the English name of a language."""
    return LANGUAGE_NAMES.get(code, code)


def read_speech_rules(folder: Path, tokenizer: ParallmTokenizer) -> SpeechRules | None:
    """Return the rules of the speech model in a folder; None if it is none.

    Raises:
        ModelLoadError: a file has a value that it cannot have, or the vocabulary lacks a token.
    """
    config = Fields.read(folder / "config.json")
    if config is None or config.text("model_type") not in SPEECH_TYPES:
        return None
    own = Fields.read(folder / GENERATION)
    generation = own or config
    vocabulary = tokenizer.vocabulary()
    size = config.count("vocab_size", 1) or config.count("n_vocab", 1) or len(vocabulary)
    fields = generation.over(config)
    languages = _languages(generation, vocabulary, size)
    initial = fields.count("max_initial_timestamp_index")
    end_id = _token(fields, "eos_token_id", END, vocabulary, size)
    banned_ids = _banned(fields, "suppress_tokens", size)
    if own is None and not banned_ids:
        logger.warning("%s has no %s, so no tokens are suppressed.", folder, GENERATION)
    # transformers makes an empty tokenizer for a folder that has none.
    if len(vocabulary) < end_id:
        raise ModelLoadError(f"The vocabulary has {len(vocabulary)} tokens. {FILES_NEEDED}")
    return SpeechRules(
        start_id=_token(fields, "decoder_start_token_id", START, vocabulary, size),
        end_id=end_id,
        no_timestamps_id=_token(fields, "no_timestamps_token_id", NO_TIMESTAMPS, vocabulary, size),
        no_speech_id=next((vocabulary[name] for name in NO_SPEECH if name in vocabulary), None),
        previous_id=fields.token("prev_sot_token_id", size) or vocabulary.get(PREVIOUS),
        languages=languages,
        tasks={task: _id_of(f"<|{task}|>", vocabulary) for task in TASKS if languages},
        banned_ids=banned_ids,
        begin_banned_ids=_banned(fields, "begin_suppress_tokens", size),
        max_initial=LATEST if initial is None else initial,
        vocab_size=size,
        max_length=config.count("max_target_positions", 1)
        or config.count("n_text_ctx", 1)
        or MAX_LENGTH,
        num_mels=config.count("num_mel_bins", 1) or config.count("n_mels", 1) or NUM_MELS,
    )


def _languages(generation: Fields, vocabulary: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the tokens of languages by code; none for a model of one language."""
    named = generation.part("lang_to_id").values
    tokens = named or {
        name: number for name, number in vocabulary.items() if LANGUAGE.fullmatch(name)
    }
    languages = {
        match[1]: number
        for name, number in tokens.items()
        if (match := LANGUAGE.fullmatch(name)) and isinstance(number, int)
    }
    is_one = not generation.values.get("is_multilingual", size != ENGLISH_SIZE)
    # Vocabularies of English models have tokens of tasks and languages that were never trained.
    return {} if is_one or len(languages) < 2 else languages


def _banned(fields: Fields, name: str, size: int) -> tuple[int, ...]:
    """Return a list of token ids without -1, which stands for no token, as in transformers."""
    value = fields.values.get(name)
    if is_list(value):
        fields = fields.replaced(name, [each for each in value if each != NO_TOKEN])
    return fields.tokens(name, size)


def _token(fields: Fields, name: str, token: str, vocabulary: Mapping[str, int], size: int) -> int:
    token_id = fields.token(name, size)
    return _id_of(token, vocabulary) if token_id is None else token_id


def _id_of(token: str, vocabulary: Mapping[str, int]) -> int:
    if token not in vocabulary:
        raise ModelLoadError(f"The vocabulary has no {token}. {FILES_NEEDED}")
    return vocabulary[token]
