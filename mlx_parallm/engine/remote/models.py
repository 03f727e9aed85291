"""What is known of a model that generates, on its way to another process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.engine.remote.grammars import Ask, RemoteGrammars
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.parsing.registry import reasoning_format, tool_format


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """A model whose parts can be pickled.

    Attributes:
        model: without its formats and grammars.
        tool_format: the name of its format; None: it has none.
        reasoning_format: likewise.
        vocabulary: of its grammars; None: there are none.
    """

    model: ServedModel
    tool_format: str | None
    reasoning_format: str | None
    vocabulary: GrammarVocabulary | None

    @classmethod
    def of(cls, model: ServedModel) -> PackedModel:
        """Pack a model."""
        tools, reasoning, grammars = model.tool_format, model.reasoning_format, model.grammars
        return cls(
            model=replace(model, tool_format=None, reasoning_format=None, grammars=None),
            tool_format=None if tools is None else tools.name,
            reasoning_format=None if reasoning is None else reasoning.name,
            vocabulary=None if grammars is None else grammars.vocabulary,
        )

    def unpack(self, ask: Ask) -> ServedModel:
        """The model; ``ask`` queries the state of the engines that it was packed in."""
        tools, reasoning, vocabulary = self.tool_format, self.reasoning_format, self.vocabulary
        name = self.model.names[0]
        return replace(
            self.model,
            tool_format=None if tools is None else tool_format(tools),
            reasoning_format=None if reasoning is None else reasoning_format(reasoning),
            grammars=None if vocabulary is None else RemoteGrammars(name, vocabulary, ask),
        )
