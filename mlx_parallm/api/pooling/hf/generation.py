"""Hugging Face's tasks of encoder-decoders: translation, summarization, text2text-generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Response

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.hf.generation_answer import TaskAnswer, finished_text
from mlx_parallm.api.pooling.hf.generation_schema import GenerationParameters
from mlx_parallm.api.pooling.hf.schema import TaskParameters, TaskRequest
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, as_texts
from mlx_parallm.api.turns.constraints import grammar_of
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.prelude import Admitted, Prelude, generator
from mlx_parallm.api.turns.sources import SourceForm, read_source, source_params, text_side
from mlx_parallm.api.turns.stream import StreamForm, respond
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar.structured_outputs import structured_outputs_spec
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.tokenizer.seq2seq.rules import TaskDefaults
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar, StructuredOutputsParams
from mlx_parallm.types.request import GenerateRequest, SamplingParams

# EVENTS: TGI ends a stream with its last token; its own client reads no other end.
EVENTS = StreamForm(sse.data)
# TRANSLATION begins the names of tasks such as "translation_en_to_de".
TRANSLATION = "translation"
#: ``KEYS``: the key of an answer's text by task, in Hugging Face's names.
KEYS = {
    TRANSLATION: "translation_text",
    "summarization": "summary_text",
    "text2text-generation": "generated_text",
    "text-generation": "generated_text",
}
#: ``GENERATES``: parameters that no task of a pooling model has.
GENERATES = frozenset(GenerationParameters.model_fields) | {"generate_parameters"}
# LENGTHS and SEARCH: parameters by the names of ``TaskDefaults``.
LENGTHS = ("max_length", "min_length", "max_new_tokens", "min_new_tokens")
SEARCH = ("num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size")
# FIELDS: what these bodies call the engine's names.
FIELDS = {
    "n": "num_return_sequences",
    "prompt": "inputs",
    "messages": "inputs",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "beam_width": "num_beams",
}


def is_generating(task: str) -> bool:
    """True if a task, by Hugging Face's name, is one of encoder-decoders."""
    return task in KEYS or task.startswith(f"{TRANSLATION}_")


def encoder_decoder(engine: RequestClient, name: str | None) -> GenerationModel | None:
    """Return the model of a name if it generates, or the first encoder-decoder; None: neither."""
    client = GENERATION.client(engine)
    if name is None:
        return next((model for model in client.models() if model.takes_sources), None)
    status = engine.find(name)
    is_one = status is not None and isinstance(status.model, GenerationModel)
    return client.get_model(name) if is_one else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A request of a task.

    Attributes:
        name: of the task; None: the path names none.
        texts: the sources.
        parameters: the body's.
        stream: whether the answer is a stream.
        grammar: what outputs must match.
    """

    name: str | None
    texts: Sequence[str]
    parameters: TaskParameters
    stream: bool
    grammar: Grammar | None

    def form(self, truncate: bool | int | None) -> SourceForm:
        """Return how its sources are read."""
        parameters = self.parameters
        cuts = parameters.truncation in ("longest_first", "only_first") or truncate is True
        length = truncate if isinstance(truncate, int) and not isinstance(truncate, bool) else None
        return SourceForm(
            src_lang=parameters.src_lang,
            tgt_lang=parameters.tgt_lang,
            task=self.name,
            truncate=-1 if cuts and length is None else length,
            param="inputs",
            cut_by="truncate" if length is not None else "truncation",
        )

    def defaults(self, model: GenerationModel) -> TaskDefaults:
        """Return how outputs are generated: as the model's files and the parameters say."""
        parameters = self.parameters
        defaults = text_side(model).task_defaults(
            self.name, src_lang=parameters.src_lang, tgt_lang=parameters.tgt_lang
        )
        named = _given(parameters, (*LENGTHS, *SEARCH))
        # A length that counts all tokens goes before a default that counts new ones.
        for own, other in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if own in named:
                named.setdefault(other, None)
        return replace(defaults, **named)

    def params(self, model: GenerationModel, prompt_len: int) -> SamplingParams:
        """Return the engine's parameters of a source.

        Raises:
            InvalidRequestError: parameters exclude each other, or are out of range.
        """
        parameters, defaults = self.parameters, self.defaults(model)
        beams = self._beams(defaults, prompt_len)
        _check_lengths(parameters, defaults)
        has_most = bool(_given(parameters, ("max_length", "max_new_tokens")))
        has_least = bool(_given(parameters, ("min_length", "min_new_tokens")))
        params = SamplingParams(
            n=parameters.num_return_sequences or 1,
            beams=beams,
            max_tokens=defaults.most_tokens(prompt_len) if has_most else None,
            min_tokens=defaults.least_tokens(prompt_len) if has_least else 0,
            no_repeat_ngram_size=defaults.no_repeat_ngram_size,
            repetition_penalty=parameters.repetition_penalty or defaults.repetition_penalty,
            frequency_penalty=parameters.frequency_penalty or 0.0,
            seed=parameters.seed,
            stop=parameters.stops(),
            grammar=self.grammar,
            logprobs=0 if parameters.details or self.stream else None,
            **self._sampling(),
        )
        if params.n > 1 and beams is None and params.temperature == 0:
            raise InvalidRequestError(
                "num_return_sequences above 1 needs num_beams or do_sample.",
                param="num_return_sequences",
            )
        named = ["max_tokens"] * has_most + ["min_tokens"] * has_least
        return source_params(params, model, prompt_len, named=named, defaults=defaults)

    def _sampling(self) -> dict[str, Any]:
        """Return how tokens are drawn; they are the likeliest unless the parameters say so."""
        if not self.parameters.samples:
            return {"temperature": 0.0}
        return {"temperature": 1.0} | _given(self.parameters, ("temperature", "top_p", "top_k"))

    def _beams(self, defaults: TaskDefaults, prompt_len: int) -> BeamParams | None:
        """Return the beam search; the files' own is left out where it cannot be."""
        parameters = self.parameters
        is_own = parameters.num_beams is not None
        if is_own and self.stream and defaults.num_beams > 1:
            raise InvalidRequestError("Beam search cannot be streamed.", param="num_beams")
        needs_samples = self.stream or parameters.samples or parameters.stops() or self.grammar
        if defaults.num_beams == 1 or (needs_samples and not is_own):
            return None
        return BeamParams(
            width=defaults.num_beams,
            length_penalty=defaults.length_penalty,
            early_stopping=defaults.early_stopping,
            # transformers generates what stands behind the start token, forced tokens too.
            num_counted=prompt_len - 1,
        )


def _given(parameters: GenerationParameters, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(parameters, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _check_lengths(parameters: GenerationParameters, defaults: TaskDefaults) -> None:
    """Refuse a least length over the most; the files' own is cut to a request's most."""
    own = _given(parameters, ("min_length", "min_new_tokens"))
    most = defaults.most_tokens(0)
    if own and most is not None and defaults.least_tokens(0) > most:
        (name, *_) = own
        raise InvalidRequestError(f"{name} exceeds the most tokens of an output.", param=name)


async def run_generation(
    body: TaskRequest, prelude: Prelude, name: str | None, task: str | None
) -> Response:
    """Do a task with an encoder-decoder: the one of this name, else the first.

    Raises:
        InvalidRequestError: none is served, or the body asks for what cannot be.
    """
    parameters = body.all_parameters()
    parameters.check_supported()
    texts = as_texts(body.inputs)
    if texts is None or (body.stream and len(texts) > 1):
        what = "a text" if body.stream else f"a text or a list of 1 to {MAX_INPUTS} texts"
        raise InvalidRequestError(f"inputs must be {what}.", param="inputs")
    if body.stream and (parameters.num_return_sequences or 1) > 1:
        raise InvalidRequestError("A stream has one text.", param="num_return_sequences")
    own_name, model = _model(prelude, name, parameters)
    with named_by(FIELDS):
        admitted = await prelude.admit_to(
            model,
            own_name,
            n=parameters.num_return_sequences or 1,
            num_prompts=len(texts),
            fields=FIELDS,
        )
        grammar = await _grammar(parameters, model)
        own_task = _Task(
            name=task,
            texts=texts,
            parameters=_with_pair(parameters, task, model),
            stream=body.stream,
            grammar=grammar,
        )
        prompts, requests = await _requests(own_task, admitted, parameters.truncate)
    answer = TaskAnswer(
        admitted,
        prompts,
        n=requests[0].params.n,
        keys=_keys(task),
        is_list=isinstance(body.inputs, list),
        has_details=bool(parameters.details),
        finish=finished_text if parameters.clean_up_tokenization_spaces else str,
    )
    generation = await admitted.start(requests, FIELDS)
    return await respond(prelude, generation, answer, stream=body.stream, form=EVENTS)


def _with_pair(
    parameters: TaskParameters, task: str | None, model: GenerationModel
) -> TaskParameters:
    """Return the parameters with the languages of a task such as "translation_en_to_de".

    As in transformers, languages in the body go before them, and a model without languages takes
    no notice. A task of the model's files has its own prefix instead.
    """
    sides = text_side(model)
    if task is None or not sides.languages or task in sides.rules.tasks:
        return parameters
    source, divider, target = task.removeprefix(f"{TRANSLATION}_").partition("_to_")
    if not divider or parameters.src_lang is not None or parameters.tgt_lang is not None:
        return parameters
    return parameters.model_copy(update={"src_lang": source, "tgt_lang": target})


def _keys(task: str | None) -> tuple[str, ...]:
    if task is None:
        return tuple(dict.fromkeys(KEYS.values()))
    return (KEYS[task if task in KEYS else TRANSLATION],)


def _model(
    prelude: Prelude, name: str | None, parameters: TaskParameters
) -> tuple[str, GenerationModel]:
    engine = prelude.engine
    first = encoder_decoder(engine, None)
    if name is None and first is None:
        raise InvalidRequestError("No encoder-decoder is served here.", param="model")
    name = name or (first.names[0] if first is not None else None)
    name, model = generator(
        engine, name, parameters.adapter_id, field="adapter_id", takes_sources=True
    )
    if not model.takes_sources:
        raise InvalidRequestError(
            f"{name} is not an encoder-decoder: use /v1/completions.", param="model"
        )
    return name, model


async def _requests(
    task: _Task, admitted: Admitted, truncate: bool | int | None
) -> tuple[list[ImagePrompt], list[GenerateRequest]]:
    model, prelude = admitted.model, admitted.prelude
    form = task.form(truncate)

    def encode() -> list[ImagePrompt]:
        return [read_source(text, model, form) for text in task.texts]

    prompts = await maybe_in_thread(encode, sum(map(len, task.texts)))
    group = f"task-{prelude.answer_id}"
    requests = [
        GenerateRequest(
            request_id=f"{group}-{number}",
            model=model.names[0],
            prompt_ids=prompt.token_ids,
            inputs=prompt.inputs,
            params=task.params(model, len(prompt.token_ids)),
            client=prelude.client,
            group=group,
        )
        for number, prompt in enumerate(prompts)
    ]
    return prompts, requests


async def _grammar(parameters: GenerationParameters, model: GenerationModel) -> Grammar | None:
    """Return what outputs must match, in TGI's form: a JSON schema or a regular expression."""
    if parameters.grammar is None:
        return None
    form = BodyValue(parameters.grammar, "grammar")
    value = form["value"]["schema"] if form.type == "json_schema" else form["value"]
    if form.type not in ("json", "json_schema", "regex") or value.value is None:
        raise form.refusal("must have type, json or regex, and value")
    is_regex = form.type == "regex"
    structure = StructuredOutputsParams(
        regex=value.text() if is_regex else None, json=None if is_regex else value.value
    )
    spec = structured_outputs_spec(structure, param="grammar")
    assert spec is not None, "it has one structure"
    return await grammar_of(spec, model, param="grammar")
