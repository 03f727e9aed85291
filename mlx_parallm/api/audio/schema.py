"""The fields of requests that transcribe or translate a recording."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from mlx_parallm.api.http.forms import INT64, OpenForm
from mlx_parallm.types.errors import InvalidRequestError

FILE, FILE_URL = "file", "file_url"


#: The forms of answers.
JSON, TEXT, SRT, VTT, VERBOSE_JSON = "json", "text", "srt", "vtt", "verbose_json"
ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
#: Those with times.
TIMED = (SRT, VTT, VERBOSE_JSON)


class SpeechRequest(OpenForm):
    """The fields of a form beside its file. They are texts, as those of a form are."""

    model: str | None = Field(
        None, description="The model or adapter; the first speech model if absent."
    )
    language: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        None,
        description='The spoken language as an ISO 639 code ("de"), a tag with a region '
        '("de-AT") or an English name ("german"); detected if absent or "auto".',
    )
    prompt: str | None = Field(
        None,
        description="A text that the model reads as what was said before. Its last tokens count, "
        "half as many as the decoder reads.",
    )
    response_format: ResponseFormat = Field(
        JSON, description="Subtitles (srt, vtt) and verbose_json have times."
    )
    temperature: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="0 takes the likeliest tokens, and tries higher temperatures where the text "
        "repeats itself or is unlikely.",
    )
    timestamp_granularities: list[Literal["segment"]] | None = Field(
        None, description='["segment"], with verbose_json only.'
    )
    include: list[Literal["logprobs"]] | None = Field(
        None, description='["logprobs"] adds those of the tokens, with json only.'
    )
    stream: bool = Field(
        False, description="Answer by events, one for each segment; with json and text only."
    )
    chunking_strategy: Literal["auto"] | None = Field(
        None, description="Long recordings are heard in windows of 30 s in any case."
    )
    seed: int | None = Field(
        None, ge=-INT64, lt=INT64, description="Of draws at temperatures above 0."
    )
    priority: int = Field(0, ge=-INT64, lt=INT64, description="Lower is served first, as in vLLM.")

    @property
    def has_logprobs(self) -> bool:
        """True if the answer has the log-probabilities of tokens."""
        return bool(self.include)

    def check(self) -> None:
        """Refuse fields that contradict each other; raise InvalidRequestError."""
        form = self.response_format
        wants = {
            "timestamp_granularities": (
                self.timestamp_granularities,
                (VERBOSE_JSON,),
            ),
            "include": (self.include, (JSON,)),
            "stream": (self.stream, (JSON, TEXT)),
        }
        for name, (value, forms) in wants.items():
            if value and form not in forms:
                raise InvalidRequestError(
                    f"{name} needs response_format {' or '.join(forms)}, not {form}.", param=name
                )


def _schema(file_field: str, content: dict[str, Any]) -> dict[str, Any]:
    schema = SpeechRequest.model_json_schema()
    schema["properties"] = {file_field: content, **schema["properties"]}
    schema["required"] = [file_field]
    return {"schema": schema}


#: Describes the bodies for the documentation: FastAPI does not read them.
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": _schema(FILE, {"type": "string", "format": "binary"}),
            "application/json": _schema(
                FILE_URL,
                {
                    "type": "string",
                    "description": "The file as a data: URL; a form has the file itself as file.",
                },
            ),
        },
    }
}
