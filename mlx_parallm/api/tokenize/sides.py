"""The sides of encoder-decoders' tokenizers: ``side`` and the languages of ``/tokenize``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import TokenizingModel
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.types.errors import InvalidRequestError

TARGET = "target"


class SideField(NullIsAbsent):
    """The side of an encoder-decoder's tokenizer."""

    side: Literal["source", "target"] | None = Field(
        None,
        description='Of an encoder-decoder: "source" is what it reads, which is the default, '
        '"target" what it writes.',
    )

    def is_target(self) -> bool:
        """True if the tokens are those that the decoder writes."""
        return self.side == TARGET

    def sides(self, model: TokenizingModel) -> Seq2SeqTokenizer | None:
        """Return both sides of a model's tokenizer; None if it is no encoder-decoder.

        Raises:
            InvalidRequestError: it is none, and the body has fields for one.
        """
        sides = model.seq2seq if isinstance(model, GenerationModel) else None
        if sides is None:
            for name in LanguageFields.model_fields:
                if getattr(self, name, None) is not None:
                    raise InvalidRequestError(
                        f"{model.names[0]} is not an encoder-decoder: leave out {name}.",
                        param=name,
                    )
        return sides


class LanguageFields(SideField):
    """The side and the languages of a text."""

    src_lang: StrictStr | None = Field(None, description="The source's language.")
    tgt_lang: StrictStr | None = Field(None, description="The language to translate to.")

    def check_conversation(self) -> None:
        """Raise InvalidRequestError for fields that do not go with a conversation or ``inputs``."""
        for name in LanguageFields.model_fields:
            if getattr(self, name) is not None and not (name == "side" and not self.is_target()):
                raise InvalidRequestError(f"{name} goes with prompt alone.", param=name)

    def side_ids(
        self, sides: Seq2SeqTokenizer, text: str, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Return the tokens of a source, or of a decoder prompt that goes on with a text.

        Raises:
            InvalidRequestError: the model does not take these languages.
        """
        if not self.is_target():
            return sides.encode_source(
                text,
                src_lang=self.src_lang,
                tgt_lang=self.tgt_lang,
                add_special_tokens=add_special_tokens,
            )
        begin = sides.decoder_prompt(src_lang=self.src_lang, tgt_lang=self.tgt_lang)
        return [*(begin if add_special_tokens else ()), *sides.encode_target(text)]
