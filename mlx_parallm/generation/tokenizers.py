"""The tokenizers of a folder whose model generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_parallm.engine.kind import ModelFolder
from mlx_parallm.models.load_failures import load_failures

if TYPE_CHECKING:
    from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
    from mlx_parallm.tokenizer.speech.rules import SpeechRules
    from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer


@dataclass(frozen=True, slots=True)
class GenerationTokenizers:
    """The tokenizers of a folder.

    Attributes:
        output: of what the model generates, and of its prompts.
        sides: both sides of an encoder-decoder's tokenizer; None for a decoder, and for a model
            that hears.
        speech: the tokens that control a model that hears; None for others.
    """

    output: ParallmTokenizer
    sides: Seq2SeqTokenizer | None = None
    speech: SpeechRules | None = None

    @property
    def description(self) -> str:
        """Return their class."""
        return (self.sides or self.output).description


def read_tokenizers(folder: ModelFolder) -> GenerationTokenizers:
    """Return the tokenizers of a folder.

    Raises:
        ConfigError: the chat template cannot be read.
        ModelLoadError: the folder has none.
    """
    # They bring MLX, which the process of a server without an engine imports for this alone.
    from mlx_parallm.tokenizer.loading import load_tokenizer  # noqa: PLC0415
    from mlx_parallm.tokenizer.seq2seq.loading import load_seq2seq  # noqa: PLC0415
    from mlx_parallm.tokenizer.speech.rules import read_speech_rules  # noqa: PLC0415

    config, path = folder.config, folder.path
    with load_failures(path):
        tokenizer = load_tokenizer(
            path, chat_template=config.chat_template, trust_remote_code=config.trust_remote_code
        )
        speech = read_speech_rules(path, tokenizer)
        sides = load_seq2seq(path, tokenizer) if speech is None else None
        return GenerationTokenizers(tokenizer, sides, speech)
