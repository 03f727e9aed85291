"""Offline use: the server's engine without a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from mlx_parallm.adapters.formats import read_adapter_folder
from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.generation.model import GenerationModel, Tokenizer
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.offline.beams import BeamSearchOutput, BeamSearchParams, beam_search_output
from mlx_parallm.offline.completions import RequestOutput
from mlx_parallm.offline.engine import OfflineEngine, open_engine
from mlx_parallm.offline.generation import (
    Message,
    OfflineRequests,
    Prompt,
    PromptMapping,
    as_prompts,
    as_texts,
    chat_prompt,
    compiled,
    hub_tokenizer,
    is_conversation,
    part,
    plain_prompt,
    run,
)
from mlx_parallm.offline.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.pooling import Task
from mlx_parallm.types.request import RAW_LOGPROBS, SLEEP_TAGS, SamplingParams
from mlx_parallm.worker.weights.hub import log_download, resolve_adapter

if TYPE_CHECKING:
    from mlx_parallm.offline.pooling import OfflinePooling
    from mlx_parallm.offline.training import OfflineSession
    from mlx_parallm.tokenizer.loaded import HubTokenizer


class LLM:
    """Generates for many prompts at once.

    Example:
        >>> from mlx_parallm import LLM, SamplingParams
        >>> llm = LLM()  # the embedded demonstration model
        >>> llm.generate(["1, 2, 3,"], SamplingParams(max_tokens=8))[0].outputs[0].text

    The model computes on a thread of its own, so an LLM may be used on any thread, and beside a
    running event loop. With ``data_parallel_size`` above 1, so many engine processes load the
    model, and the prompts of each call are shared out among them. Thread and processes end with
    ``close``, with a ``with`` block, or with the object.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_source_len: int | None = None,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        hf_overrides: Mapping[str, Any] | None = None,
        seed: int = 0,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        memory: MemoryConfig | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        logprobs_mode: str = RAW_LOGPROBS,
        data_parallel_size: int | Literal["auto"] = 1,
        data_parallel_devices: Sequence[int | str] = (),
    ) -> None:
        """Load the model.

        Args:
            model: a folder, a GGUF file or a hub id; None: the embedded demonstration model.
            dtype: of the weights: "auto", "float32", "float16" or "bfloat16".
            max_model_len: most tokens of a prompt and its completion; None: the model's context.
            max_source_len: most tokens of a source of an encoder-decoder; None: its positions.
            chat_template: a Jinja template, or a file with one, in place of the model's.
            trust_remote_code: run Python code that comes with the tokenizer.
            hf_overrides: other values of fields of the model's config.json.
            seed: draws the seeds of samples that have none.
            cache: of the KV, such as ``CacheConfig(kv_cache_dtype="int8")``; named as flags are.
            scheduler: settings of the scheduler, likewise; no bound of steps if it has none.
            memory: limits of MLX's allocator, likewise; they hold for the whole process.
            speculative_config: see docs/speculation.md; None: no speculation.
            logprobs_mode: for parameters that name none; see docs/logprobs.md.
            data_parallel_size: engine processes; "auto" is one for each NVIDIA GPU.
            data_parallel_devices: the index of each engine's GPU; see docs/scaling.md.

        Raises:
            ConfigError: a setting is wrong.
            ModelLoadError: the model cannot be loaded.
        """
        if speculative_config is not None and not isinstance(speculative_config, SpeculativeConfig):
            speculative_config = SpeculativeConfig.from_mapping(speculative_config)
        config = EngineConfig(
            models=(
                ModelConfig(
                    path=model,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_source_len=max_source_len,
                    chat_template=chat_template,
                    trust_remote_code=trust_remote_code,
                    hf_overrides=hf_overrides or {},
                ),
            ),
            cache=cache or CacheConfig(),
            memory=memory or MemoryConfig(),
            # The queue needs no limit: one caller waits for all prompts.
            scheduler=(scheduler or SchedulerConfig(max_waiting=0)).without_default_bound(),
            speculative=speculative_config,
            logprobs_mode=logprobs_mode,
            seed=seed,
            # No stream would wait for the first step of a shape.
            warm_up=False,
        )
        self._engine = open_engine(config, data_parallel_size, data_parallel_devices)
        self._max_rank = config.adapters.max_rank
        self._requests = OfflineRequests()
        self._offline: OfflinePooling | None = None
        (self._config,) = config.models
        self._hub_tokenizer: HubTokenizer | None = None
        # Those of ``SLEEP_TAGS`` whose memory is freed.
        self._asleep: tuple[str, ...] = ()

    def close(self) -> None:
        """Free the model, and end the processes; nothing else may be called afterwards.

        Calls on other threads end with a RequestAbortedError.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _awake(self) -> OfflineEngine:
        """The engine; raise InvalidRequestError if it is asleep."""
        if self._asleep:
            raise InvalidRequestError("This LLM is asleep; call wake_up first.")
        return self._engine

    @property
    def _model(self) -> GenerationModel:
        """The model, if it generates; raise InvalidRequestError if it does not."""
        model = self._engine.model
        if not isinstance(model, GenerationModel):
            raise InvalidRequestError(
                f"{model.names[0]} is a pooling model and cannot generate.", param="model"
            )
        return model

    @property
    def _pooling(self) -> OfflinePooling:
        """The model, if it is a pooling model; raise InvalidRequestError if it is none."""
        model = self._engine.model
        if self._offline is not None:
            return self._offline
        if isinstance(model, GenerationModel):
            raise InvalidRequestError(
                f"{model.names[0]} is a model that generates, not a pooling model.", param="model"
            )
        # The paths of routes import FastAPI, which a model that generates does not need.
        offline: OfflinePooling = part("pooling").OfflinePooling(model, self._engine)
        self._offline = offline
        return offline

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that generates."""
        return self._model.tokenizer

    def grammar(self, spec: GrammarSpec) -> Grammar:
        """Return a grammar for ``SamplingParams.grammar``; see ``grammar.spec``.

        Raises:
            InvalidRequestError: the specification is wrong, or cannot be enforced.
        """
        return compiled(spec, self._model)

    def get_tokenizer(self) -> HubTokenizer:
        """Return transformers' tokenizer of the model's folder, a ``PreTrainedTokenizerBase``.

        It has the ``chat_template`` of the LLM; changing it changes nothing in the LLM, which has a
        tokenizer of its own (``tokenizer``).

        Raises:
            ModelLoadError: transformers cannot load it.
        """
        if self._hub_tokenizer is None:
            self._hub_tokenizer = hub_tokenizer(self._config)
        return self._hub_tokenizer

    def sleep(self, level: int = 1) -> None:
        """Free memory until ``wake_up``, for other work on the device; calls are refused meanwhile.

        Args:
            level: 1 frees KV, and moves weights to the host's memory where the device has its own.
                2 also frees the weights, which ``wake_up`` reads again from the model's folder.

        Raises:
            InvalidRequestError: there is no such level, or it is a pooling model.
        """
        if level not in (1, 2):
            raise InvalidRequestError("level must be 1 or 2.", param="level")
        assert self._model, "only a model that generates can sleep"
        self._engine.call(lambda client: client.control.sleep(level, PauseMode.ABORT))
        self._asleep = SLEEP_TAGS

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again after ``sleep``; nothing happens if the LLM is awake.

        Args:
            tags: of "weights" and "kv_cache"; None: both. Other calls are refused until both are
                there.

        Raises:
            InvalidRequestError: there is no such tag.
        """
        wanted = SLEEP_TAGS if tags is None else tuple(tags)
        unknown = [tag for tag in wanted if tag not in SLEEP_TAGS]
        if unknown:
            raise InvalidRequestError(
                f"tags must be among {', '.join(SLEEP_TAGS)}, not {unknown[0]!r}.", param="tags"
            )
        if self._asleep:
            self._asleep = tuple(self._engine.call(lambda client: client.control.wake_up(wanted)))

    def load_adapter(
        self, name: str, folder: str | Path, *, version: str | None = None
    ) -> AdapterInfo:
        """Load a LoRA or DoRA adapter, or replace the one of this name.

        Args:
            name: the name for ``adapter`` of ``generate`` and ``chat``.
            folder: a folder that PEFT or mlx-lm wrote, or a hub id.
            version: a label for the weights; None counts them from 1.

        Raises:
            InvalidRequestError: the folder has no adapter, or none that fits the model.
            ModelLoadError: there is no such folder, and no such adapter on the hub.
        """
        engine = self._awake
        weights = read_adapter_folder(resolve_adapter(folder, log_download), param="folder")
        upload = AdapterUpload(name=name, weights=weights, version=version, replaces=True)
        return engine.call(lambda client: client.control.load_adapter(upload))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            NotFoundError: no adapter has this name.
        """
        self._awake.call(lambda client: client.control.unload_adapter(name))

    def generate(
        self,
        prompts: Prompt | PromptMapping | Sequence[Prompt | PromptMapping],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or a list of token ids; return an output for each, in order.

        Args:
            prompts: one prompt or several. With images a prompt is vLLM's mapping: "prompt" or
                "prompt_token_ids" with the model's placeholders, and "multi_modal_data", which has
                under "image" an image or a list of them: Pillow images, paths, bytes or URLs.
                A prompt of an encoder-decoder is its source; vLLM's mapping may have both sides,
                "encoder_prompt" and "decoder_prompt", and "src_lang" and "tgt_lang".
            sampling_params: parameters for all prompts, or one for each.
            adapter: the name of a loaded adapter for all prompts, or one for each; None is the
                model itself.
            on_finish: called with each output as its prompt ends, e.g. to move a progress bar.

        Raises:
            InvalidRequestError: a prompt can never be served, or an adapter is not loaded. Nothing
                was generated.
            StepError: a step failed.
        """
        items = [plain_prompt(prompt, lambda: self._model) for prompt in as_prompts(prompts)]
        return self._generate(items, sampling_params, adapter, on_finish)

    def _generate(
        self,
        items: Sequence[Prompt | ImagePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        made = self._requests.make(items, lambda: self._model, sampling_params, adapter)
        return run(made, self._awake, on_finish)

    def beam_search(
        self,
        prompts: Prompt | PromptMapping | Sequence[Prompt | PromptMapping],
        params: BeamSearchParams,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt, found by beams; see ``generate``."""
        outputs = self.generate(prompts, params.sampling_params(), adapter=adapter)
        return [beam_search_output(output, self.tokenizer) for output in outputs]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; see ``generate``.

        Contents may have parts: texts, and images as ``{"type": "image", "image": …}`` with the
        bytes of a file, a path or a Pillow image, or as ``image_url``. ``mm_processor_kwargs`` may
        have ``min_pixels`` and ``max_pixels``, to which images are resized.
        """
        several = [conversations] if is_conversation(conversations) else conversations
        variables = self._model.template_variables(chat_template_kwargs or {})
        options = {"tools": tools, "template_kwargs": variables}
        sizes = mm_processor_kwargs
        prompts = [chat_prompt(list(each), self._model, options, sizes) for each in several]  # type: ignore[arg-type]
        return self._generate(prompts, sampling_params, adapter)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        adapter: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt, as ``/v1/embeddings`` gives it.

        Args:
            prompts: texts, which get the model's default prompt; or token ids.
            truncate_prompt_tokens: longer prompts are cut to so many tokens; -1: to what the
                model takes; None: they are refused.
            dimensions: length of the vectors; None: the model's.
            adapter: the name of a loaded adapter; None: the model itself.

        Raises:
            InvalidRequestError: the model does not embed, or a prompt cannot be read.
            StepError: the model failed.
        """
        prompts = as_prompts(prompts)
        return self._pooling.embed(prompts, truncate_prompt_tokens, dimensions, adapter)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        adapter: str | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each label for each prompt; see ``embed``."""
        return self._pooling.classify(as_prompts(prompts), truncate_prompt_tokens, adapter)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of ``data_2`` fits its text of ``data_1``.

        It is what ``/v1/score`` gives.

        Args:
            data_1: one text for all of ``data_2``, or as many as those.
            data_2: one text or several.
            truncate_prompt_tokens: see ``embed``.

        Raises:
            InvalidRequestError: the model scores no pairs, or the numbers of texts do not fit.
            StepError: the model failed.
        """
        return self._pooling.score(as_texts(data_1), as_texts(data_2), truncate_prompt_tokens)

    def reward(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the reward of each prompt, an array of one number; see ``embed``."""
        return self._pooling.reward(as_prompts(prompts), truncate_prompt_tokens)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: Task | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return an array for each prompt, as ``/v1/pooling`` gives it.

        Args:
            prompts: see ``embed``; no prompt of the model is put before texts.
            pooling_task: "embed", "token_embed", "classify" or "token_classify"; None: the model's
                main one.
            truncate_prompt_tokens: see ``embed``.

        Raises:
            InvalidRequestError: the model cannot do the task, or a prompt cannot be read.
            StepError: the model failed.
        """
        return self._pooling.encode(as_prompts(prompts), pooling_task, truncate_prompt_tokens)

    def fill_mask(
        self,
        prompts: str | Sequence[str],
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        adapter: str | None = None,
    ) -> list[Any]:
        """Return the likeliest tokens at each prompt's mask, as Hugging Face's pipeline does.

        Args:
            prompts: texts with the tokenizer's mask token. A text with several masks gets a list
                for each.
            top_k: tokens for each mask.
            targets: words to choose among; None: the whole vocabulary.
            adapter: the name of a loaded adapter; None: the model itself.

        Returns:
            For each prompt a list of ``score``, ``token``, ``token_str`` and ``sequence``, the
            likeliest first.

        Raises:
            InvalidRequestError: the model is no masked LM, or a text has no mask.
            StepError: the model failed.
        """
        return self._pooling.fill_mask(as_texts(prompts), top_k, targets, adapter)

    def mezo(
        self,
        objective: Mapping[str, Any] | None = None,
        data: Sequence[Mapping[str, Any]] | str | Path | None = None,
        *,
        path: str | Path | None = None,
        cache_bytes: int = 256 << 20,
        **settings: Any,
    ) -> OfflineSession:
        """Return a training session of the model, which learns by forward passes.

        Args:
            objective: what is learnt, as the route has it; see docs/training.md.
            data: rows as the route has them, or a file with one as JSON in each line.
            path: a folder of its own, which keeps the session; None: a temporary one. A folder that
                has a session already goes on with it; it is then the only argument.
            cache_bytes: most memory of the hidden states that the sessions of the model keep.
            **settings: the other fields of the route, such as ``adapter``, ``trainable``,
                ``estimator``, ``batch_size`` and ``seed``.

        Raises:
            InvalidRequestError: a field is wrong, or the model cannot be trained in this way.
            StorageError: the folder cannot be used.
        """
        named = {"objective": objective, "data": data}
        fields = {name: value for name, value in named.items() if value is not None} | settings
        session: OfflineSession = part("training").open_session(
            lambda: self._awake, path, fields, cache_bytes=cache_bytes, max_rank=self._max_rank
        )
        return session
