"""Rules of encoder-decoders: how decoding begins and ends, and defaults of tasks.

They are read from ``config.json`` and ``generation_config.json``, as transformers reads them, and
from ``task_specific_params``, which transformers' pipelines took before version 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlx_parallm.models.checkpoints.encoder_decoders import (
    is_encoder_decoder,
    target_vocab_size,
)
from mlx_parallm.tokenizer.seq2seq.fields import Fields
from mlx_parallm.types.beams import MAX_BEAMS, MAX_LENGTH_PENALTY
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list

#: ``UNSERVED``: fields of generation that are not served, and the values that change nothing.
UNSERVED: Mapping[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "begin_suppress_tokens": ([],),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
}
# _POSITIONED: model types with a table of positions that has an end.
_POSITIONED = frozenset({"bart", "marian", "mbart", "pegasus"})
_CONFIG = "config.json"
_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """Settings of generation that a request may replace, in transformers' terms.

    Attributes:
        prefix: a text before each source.
        num_beams: width of the beam search; 1 without one.
        length_penalty: exponent of the length that divides a hypothesis' score.
        early_stopping: when a beam search ends; see transformers.
        renormalize_logits: True: beams add up log-probabilities that are normalised after bans.
        no_repeat_ngram_size: n-grams of this size occur once; 0: no limit.
        repetition_penalty: what logits of the decoder's tokens are divided by; 1: nothing.
        min_length: least tokens of the decoder's sequence, its prompt included.
        max_length: most tokens of it, its prompt included; None if no file says so.
        min_new_tokens: least tokens after the start token; None: ``min_length`` counts.
        max_new_tokens: most tokens after the start token; None: ``max_length`` counts.
    """

    prefix: str = ""
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    renormalize_logits: bool = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_length: int = 0
    max_length: int | None = None
    min_new_tokens: int | None = None
    max_new_tokens: int | None = None

    def least_tokens(self, prompt_len: int) -> int:
        """Return the least tokens to generate after a decoder prompt, forced tokens included."""
        least = self.min_length if self.min_new_tokens is None else self.min_new_tokens + 1
        return max(least - prompt_len, 0)

    def most_tokens(self, prompt_len: int) -> int | None:
        """Return the most tokens to generate after a decoder prompt, at least 1.

        None if no file limits them.
        """
        most = self.max_length if self.max_new_tokens is None else self.max_new_tokens + 1
        return None if most is None else max(most - prompt_len, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqRules:
    """Beginning and end of an encoder-decoder's output, and defaults of its tasks.

    Attributes:
        model_type: the name of its architecture.
        decoder_start_id: the token before all output; None if the target language's token is.
        forced_bos_id: the first token of all output; None if there is none, or the request's
            target language decides.
        forced_eos_ids: tokens of which one is the last of an output that reaches its limit.
        banned_ids: tokens that are never generated (``bad_words_ids`` and ``suppress_tokens``).
        max_source_positions: positions of the encoder; None if they have no end.
        unserved: fields of generation that the files have and that change nothing here.
        defaults: how texts are generated if no task says otherwise.
        tasks: likewise by task, such as "summarization" or "translation_en_to_de".
    """

    model_type: str
    decoder_start_id: int | None
    forced_bos_id: int | None = None
    forced_eos_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    max_source_positions: int | None = None
    unserved: tuple[str, ...] = ()
    defaults: TaskDefaults = field(default_factory=TaskDefaults)
    tasks: Mapping[str, TaskDefaults] = field(default_factory=dict[str, TaskDefaults])

    def of_task(self, task: str | None) -> TaskDefaults:
        """Return the defaults of a task; those of the model if it is None or has none of its own.

        Prefixes are for tasks alone: without a task, a source stays as it is.
        """
        return self.defaults if task is None else self.tasks.get(task, self.defaults)


def read_rules(folder: Path) -> Seq2SeqRules | None:
    """Return the rules of the encoder-decoder in a folder; None if it is none.

    Raises:
        ModelLoadError: a file is not JSON, or a field has a value that it cannot have.
    """
    config = Fields.read(folder / _CONFIG)
    if config is None or not is_encoder_decoder(config.values):
        return None
    # transformers reads the fields of generation from the older file only where the newer one
    # does not exist.
    generation = Fields.read(folder / _GENERATION) or config
    for name in ("vocab_size", "decoder_vocab_size"):
        config.count(name, 1)
    vocab_size = target_vocab_size(config.values)
    model_type = config.text("model_type") or ""
    positions = config.count("max_position_embeddings", 1)
    defaults = _defaults(generation, config.text("prefix") or "")
    return Seq2SeqRules(
        model_type=model_type,
        decoder_start_id=_decoder_start(folder, generation.over(config), model_type, vocab_size),
        forced_bos_id=_forced_bos(generation, config, vocab_size),
        forced_eos_ids=generation.tokens("forced_eos_token_id", vocab_size),
        banned_ids=_banned(generation, vocab_size),
        max_source_positions=positions if model_type in _POSITIONED else None,
        unserved=tuple(
            name
            for name, idle in UNSERVED.items()
            if generation.values.get(name) not in (*idle, None)
        ),
        defaults=defaults,
        tasks=_tasks(config, generation),
    )


def _decoder_start(
    folder: Path, fields: Fields, model_type: str, vocab_size: int | None
) -> int | None:
    for name in ("decoder_start_token_id", "bos_token_id"):
        token_id = fields.token(name, vocab_size)
        # mBART's output begins with the target language.
        if token_id is not None or model_type == "mbart":
            return token_id
    raise ModelLoadError(
        f"{folder}: config.json has no decoder_start_token_id, with which output begins."
    )


def _forced_bos(generation: Fields, config: Fields, vocab_size: int | None) -> int | None:
    forced = generation.token("forced_bos_token_id", vocab_size)
    if (
        forced is None
        and generation is config
        and config.values.get("force_bos_token_to_be_generated")
    ):
        return config.token("bos_token_id", vocab_size)
    return forced


def _banned(generation: Fields, vocab_size: int | None) -> tuple[int, ...]:
    """Return the tokens of ``bad_words_ids``, each of one token, and ``suppress_tokens``."""
    words = generation.values.get("bad_words_ids", [])
    if not is_list(words) or not all(is_list(word) and len(word) == 1 for word in words):
        raise generation.error("bad_words_ids", "must be a list of lists of one token id")
    flat = generation.replaced("bad_words_ids", [token_id for word in words for token_id in word])
    banned = flat.tokens("bad_words_ids", vocab_size)
    return tuple(sorted({*banned, *generation.tokens("suppress_tokens", vocab_size)}))


def _tasks(config: Fields, generation: Fields) -> Mapping[str, TaskDefaults]:
    """Return the defaults of each task, whose own fields go before those of the model."""
    listed = config.part("task_specific_params")
    prefix = config.text("prefix") or ""
    return {task: _defaults(listed.part(task).over(generation), prefix) for task in listed.values}


def _defaults(fields: Fields, prefix: str) -> TaskDefaults:
    own = fields.text("prefix")
    defaults = TaskDefaults(
        prefix=prefix if own is None else own,
        num_beams=fields.count("num_beams", 1) or 1,
        length_penalty=_or(fields.number("length_penalty"), 1.0),
        early_stopping=_early_stopping(fields),
        renormalize_logits=fields.flag("renormalize_logits"),
        no_repeat_ngram_size=fields.count("no_repeat_ngram_size") or 0,
        repetition_penalty=_repetition_penalty(fields),
        min_length=fields.count("min_length") or 0,
        max_length=fields.count("max_length", 1),
        min_new_tokens=fields.count("min_new_tokens"),
        max_new_tokens=fields.count("max_new_tokens", 1),
    )
    most = defaults.most_tokens(0)
    if most is not None and defaults.least_tokens(0) > most:
        name = "min_length" if defaults.min_new_tokens is None else "min_new_tokens"
        raise fields.error(name, f"must be at most the {most} tokens of the longest output")
    if defaults.num_beams > MAX_BEAMS:
        raise fields.error("num_beams", f"must be at most {MAX_BEAMS}")
    if abs(defaults.length_penalty) > MAX_LENGTH_PENALTY:
        bound = f"{MAX_LENGTH_PENALTY:g}"
        raise fields.error("length_penalty", f"must be between -{bound} and {bound}")
    return defaults


def _early_stopping(fields: Fields) -> bool | Literal["never"]:
    value = fields.values.get("early_stopping", False)
    if value == "never" or isinstance(value, bool):
        return value
    raise fields.error("early_stopping", 'must be true, false or "never"')


def _repetition_penalty(fields: Fields) -> float:
    value = _or(fields.number("repetition_penalty"), 1.0)
    if value <= 0:
        raise fields.error("repetition_penalty", "must be above 0")
    return value


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
