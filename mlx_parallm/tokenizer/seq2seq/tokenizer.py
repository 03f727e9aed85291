"""An encoder-decoder's two sides of texts: what its encoder reads and what its decoder writes."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.tokenizer.cut import cut_ids, specials_around
from mlx_parallm.tokenizer.seq2seq.languages import Languages, Marks
from mlx_parallm.tokenizer.seq2seq.rules import Seq2SeqRules, TaskDefaults
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

# _TRANSLATION begins the names of tasks that translate, such as "translation_en_to_de".
_TRANSLATION = "translation"
# _DESCRIBED: languages in a description.
_DESCRIBED = 5


class Seq2SeqTokenizer:
    """Sources and decoder prompts of an encoder-decoder. Its methods are safe from any thread.

    Args:
        source: encodes sources.
        target: encodes and decodes the decoder's texts; it is the model's tokenizer.
        rules: how the decoder's output begins and ends.
        languages: the languages that requests may name.
    """

    def __init__(
        self,
        source: ParallmTokenizer,
        target: ParallmTokenizer,
        rules: Seq2SeqRules,
        languages: Languages,
    ) -> None:
        self.source = source
        self.target = target
        self.rules = rules
        self._languages = languages
        self._begin, self._end = specials_around(
            source.encode("a"), source.encode("a", add_special_tokens=False)
        )

    @property
    def description(self) -> str:
        """Its class, the library that encodes, and the languages."""
        names = self.languages
        some = ", ".join(names[:_DESCRIBED]) + (", …" if len(names) > _DESCRIBED else "")
        languages = f"{len(names)} languages: {some}" if names else "no languages"
        sides = "" if self.source is self.target else ", one for each side"
        return f"{self.target.description}{sides}, {languages}"

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that requests may name; empty if there are none."""
        return self._languages.names

    def encode_source(
        self,
        text: str,
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        task: str | None = None,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[int]:
        """Return the ids of a source, special tokens and those of languages included.

        Args:
            text: the source.
            src_lang: its language.
            tgt_lang: the language to translate to; some models read it before the source.
            task: the task whose prefix is put before the text; None: no prefix.
            add_special_tokens: False: the text's own tokens alone, without languages.
            limit: a longer source is refused, or cut between its special tokens.

        Raises:
            InvalidRequestError: the model does not take these languages; ``param`` names one.
            ContextLengthError: the source is longer than ``limit`` allows.
        """
        marks = self._languages.marks(src_lang, tgt_lang)
        text = (marks.text or self._prefix(task)) + text
        if not add_special_tokens:
            ids = self.source.encode(text, add_special_tokens=False, limit=limit)
            return _cut(ids, limit, (), ())
        if marks.end is None:
            ids = self.source.encode(text, limit=limit)
            return _cut(ids, limit, self._begin, self._end)
        ids = self.source.encode(text, add_special_tokens=False, limit=limit)
        ids = [*marks.begin, *ids, *marks.end]
        limit.check(len(ids))
        return _cut(ids, limit, marks.begin, marks.end)

    def cut_source(self, token_ids: Sequence[int], limit: TokenLimit) -> list[int]:
        """Return the ids of a source, cut between its special tokens if ``limit`` cuts.

        Raises:
            ContextLengthError: there are more than ``limit`` allows.
        """
        limit.check(len(token_ids))
        return _cut(list(token_ids), limit, self._begin, self._end)

    def encode_target(self, text: str, *, limit: TokenLimit = ANY_LENGTH) -> list[int]:
        """Return the ids of a text of the decoder's side, without special tokens.

        Raises:
            ContextLengthError: it is longer than ``limit`` allows.
        """
        return self.target.encode(text, add_special_tokens=False, limit=limit)

    def decoder_prompt(
        self, *, src_lang: str | None = None, tgt_lang: str | None = None
    ) -> list[int]:
        """Return the tokens before all output: the start token, and the forced one if there is.

        Raises:
            InvalidRequestError: the model does not take these languages, or needs the target's.
        """
        marks = self._languages.marks(src_lang, tgt_lang)
        return self._prompt(marks)

    def task_defaults(
        self, task: str | None, *, src_lang: str | None = None, tgt_lang: str | None = None
    ) -> TaskDefaults:
        """Return how a task generates; that of a pair of languages goes before "translation"."""
        if task == _TRANSLATION and src_lang is not None and tgt_lang is not None:
            pair = f"{_TRANSLATION}_{src_lang}_to_{tgt_lang}"
            task = pair if pair in self.rules.tasks else task
        return self.rules.of_task(task)

    def _prefix(self, task: str | None) -> str:
        return "" if task is None else self.rules.of_task(task).prefix

    def _prompt(self, marks: Marks) -> list[int]:
        start = self.rules.decoder_start_id if marks.start_id is None else marks.start_id
        if start is None:
            raise InvalidRequestError(
                "tgt_lang is missing: this model's output begins with its language.",
                param="tgt_lang",
            )
        forced = self.rules.forced_bos_id if marks.forced_id is None else marks.forced_id
        return [start] if forced is None else [start, forced]


def _cut(
    ids: list[int], limit: TokenLimit, begin: tuple[int, ...], end: tuple[int, ...]
) -> list[int]:
    if limit.most is None or not limit.cuts:
        return ids
    return list(cut_ids(tuple(ids), limit.most, from_left=limit.from_left, begin=begin, end=end))
