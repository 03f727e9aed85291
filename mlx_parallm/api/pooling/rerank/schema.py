"""The body of ``POST /v1/rerank`` in the shapes of Jina, Cohere, vLLM and TEI.

https://api.jina.ai/docs, https://docs.cohere.com/reference/rerank,
https://huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent, OpenForm
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS
from mlx_parallm.types.errors import InvalidRequestError


class RerankDocument(NullIsAbsent):
    """A document as an object; its further fields are ignored."""

    text: StrictStr = Field(description="What is compared with the query.")


class RerankRequest(OpenForm):
    """``documents`` are Jina's, Cohere's and vLLM's; ``texts`` ask for TEI's answer."""

    query: StrictStr = Field(description="What documents are compared with.")
    documents: list[StrictStr | RerankDocument] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description='Texts, or objects with a "text".'
    )
    model: StrictStr | None = Field(
        None, description="Default: the first cross-encoder, else the first embedder."
    )
    top_n: StrictInt | None = Field(None, ge=0, description="So many results; 0 is all.")
    return_documents: StrictBool = Field(True, description="Give back the texts.")
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut inputs to so many tokens; -1 to what the model takes."
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="Only right: of a query and a document the document's end is cut."
    )
    max_tokens_per_doc: StrictInt = Field(
        0, ge=0, description="Cut documents to so many tokens before they are read; 0 leaves them."
    )
    use_activation: StrictBool = Field(True, description="False: a cross-encoder's logits.")
    request_id: StrictStr | None = Field(None, description="Part of the answer's id.")
    texts: list[StrictStr] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="TEI's name for documents."
    )
    raw_scores: StrictBool = Field(False, description="TEI's: logits.")
    return_text: StrictBool = Field(False, description="TEI's: give back the texts.")
    truncate: StrictBool = Field(False, description="TEI's: cut what is too long.")
    truncation_direction: Literal["Right", "right"] = Field(
        "Right", description="TEI's: what is too long is cut at its end."
    )

    @property
    def is_tei(self) -> bool:
        """True if the body is TEI's."""
        return self.texts is not None

    def passages(self) -> list[str]:
        """Return the texts to be ranked.

        Raises:
            InvalidRequestError: there are none, or two kinds of them.
        """
        if (self.documents is None) == (self.texts is None):
            raise InvalidRequestError("Give documents (or, for TEI, texts).", param="documents")
        texts = self.documents if self.texts is None else self.texts
        return [each.text if isinstance(each, RerankDocument) else each for each in texts or ()]
