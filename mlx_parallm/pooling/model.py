"""A pooling model as its clients see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from mlx_parallm.engine.models import KindTraits, ModelMemory, ServedModel
from mlx_parallm.engine.policies import NamedAdapter
from mlx_parallm.types.pooling import LABEL_TASKS, OwnHead, PoolingInfo, PoolingInput, PoolRequest

if TYPE_CHECKING:
    from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer

POOLING_TRAITS = KindTraits(
    name="pooling",
    takes_adapters=True,
    refuses_change="is a pooling model: its weights stay as they were loaded.",
    refuses_other="is a pooling model, not a model of this route (docs/pooling.md).",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel(ServedModel):
    """A loaded pooling model, or an adapter of one; see ``ServedModel`` for the shared fields.

    Attributes:
        names: the names that requests may use; the first is the one reported.
        root: the hub id or folder it comes from.
        created: when it was loaded, in Unix seconds.
        tokenizer: encodes its inputs.
        info: facts about the model.
        max_batch_tokens: most tokens of a batch, padding included.
        max_waiting: most distinct inputs that wait.
        parent: for an adapter, the first name of its model.
        head: the head that the adapter brings; None if it brings none.
    """

    names: tuple[str, ...]
    root: str
    created: int
    tokenizer: EncoderTokenizer
    info: PoolingInfo
    max_batch_tokens: int
    max_waiting: int
    parent: str | None = None
    head: OwnHead | None = None

    traits = POOLING_TRAITS
    #: No chat template of a pooling model writes tools, so no tool call has an id.
    reads_tools = False
    call_id_length = None

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of an input."""
        return self.info.max_model_len

    def text_ids(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """See ``GenerationModel.text_ids``."""
        return self.tokenizer.encode([text], add_special_tokens=add_special_tokens)[0]

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any],
        **ends: Any,
    ) -> Sequence[int]:
        """See ``GenerationModel.chat_ids``; there are no tools."""
        assert not tools, "the model reads none"
        return self.tokenizer.encode_chat(messages, template_kwargs=template_kwargs, **ends)

    def vocabulary_string(self, token_id: int) -> str:
        """See ``GenerationModel.vocabulary_string``."""
        return self.tokenizer.token_string(token_id)

    @property
    @override
    def tasks(self) -> Sequence[str]:
        return self.info.tasks

    @property
    @override
    def memory(self) -> ModelMemory:
        return ModelMemory(weights=self.info.weight_bytes)

    @override
    def with_adapter(self, adapter: NamedAdapter) -> Self | None:
        """None until the adapter is loaded, because its head is unknown."""
        info = adapter.info
        if info is None:
            return None
        return replace(
            self,
            names=(adapter.name,),
            root=adapter.source or adapter.name,
            created=info.created,
            info=self.info if info.head is None else with_head(self.info, info.head),
            parent=adapter.base,
            head=info.head,
        )

    def request(self, request_id: str, inputs: Iterable[PoolingInput]) -> PoolRequest:
        """Return a request for inputs that were made for this model."""
        return PoolRequest(
            request_id=request_id, model=self.names[0], inputs=tuple(inputs), head=self.head
        )


def with_head(info: PoolingInfo, head: OwnHead) -> PoolingInfo:
    """Return the facts of a model that answers with another head.

    The labels keep the model's names if there are as many; otherwise they get numbers.
    """
    if not head.num_labels:
        return info
    others = (task for task in info.tasks if task not in LABEL_TASKS)
    is_alike = frozenset(head.tasks) == LABEL_TASKS.intersection(info.tasks)
    tasks = info.tasks if is_alike else (*head.tasks, *others)
    if len(info.labels) == head.num_labels:
        return replace(info, tasks=tasks)
    labels = tuple(f"LABEL_{number}" for number in range(head.num_labels))
    return replace(info, tasks=tasks, labels=labels, problem_type=None, scores_are_logits=False)
