"""Golden vision-language models in sessions: a scheduler over a runner, fed by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mlx_parallm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_draft, make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from tests.golden_images import GoldenImages, read_vision, write_vision
from tests.integration.test_parity_generate import BLOCK_SIZE, NUM_SNAPSHOTS, Session
from tests.integration.test_prompt_embeds import InputRunner

MAX_LEN, NUM_BLOCKS = 256, 256


@cache
def golden_of(name: str) -> dict[str, Any]:
    return read_vision(name)


@cache
def loaded_of(name: str) -> LoadedModel:
    return new_load(name)


def new_load(name: str) -> LoadedModel:
    """Return a copy of a golden model that nobody else has."""
    return load_model(ModelConfig(), write_vision(Path(mkdtemp()), golden_of(name)))


@cache
def images_of(name: str) -> GoldenImages:
    return GoldenImages(golden_of(name), loaded_of(name).path)


@cache
def runner_of(name: str, backend: type[ReferenceAttention]) -> ModelRunner:
    return new_runner(loaded_of(name), backend)


def new_runner(
    loaded: LoadedModel, backend: type[ReferenceAttention], draft: LoadedModel | None = None
) -> ModelRunner:
    """Return a runner of a golden model, with another copy of it as draft model."""
    layouts = probe_layout(loaded.model)
    attention = backend(BLOCK_SIZE)
    plan = plan_kv(
        layouts,
        loaded.config,
        CacheConfig(block_size=BLOCK_SIZE),
        SchedulerConfig(max_num_seqs=8),
        MAX_LEN,
        attention,
    )
    drafting = None
    if draft is not None:
        drafting = at_once(make_draft)(
            draft,
            probe_layout(draft.model),
            backend(BLOCK_SIZE),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )[0]
    return at_once(make_runner)(loaded, layouts, plan, NUM_BLOCKS, attention, drafting)[0]


def longest_uncut(name: str) -> int:
    """Return the rows of the longest image of a golden model that one step must hold."""
    count = len(golden_of(name)["prompts"])
    sources = [each for number in range(count) for each in images_of(name).inputs(number)]
    return max((len(each.span or ()) for each in sources if not each.may_cut), default=0)


class ImageSession(Session):
    """A session of a golden model."""

    def __init__(
        self,
        name: str,
        backend: type[ReferenceAttention] = ReferenceAttention,
        *,
        num_blocks: int = NUM_BLOCKS,
        budget: int = 24,
        runner: ModelRunner | None = None,
        speculative: SpeculativeConfig | None = None,
        num_snapshots: int = NUM_SNAPSHOTS,
    ) -> None:
        budget = max(budget, longest_uncut(name))
        runner = runner or runner_of(name, backend)
        super().__init__(
            runner,
            num_blocks=num_blocks,
            budget=budget,
            speculative=speculative,
            num_snapshots=num_snapshots,
        )
        self.images = self.runner = InputRunner(runner)
        # Another session's features are no part of this one.
        self.images.runner.inputs.features.clear()
        self.name = name

    def add_prompt(
        self, request_id: str, number: int, max_tokens: int = 32, logprobs: int | None = None
    ) -> None:
        request = GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_ids=tuple(golden_of(self.name)["prompts"][number]["ids"]),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs),
            inputs=images_of(self.name).inputs(number),
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset())

    def check(self, request_id: str, number: int) -> None:
        tokens = self.result(request_id).tokens
        assert tokens == golden_of(self.name)["prompts"][number]["tokens"][: len(tokens)]
