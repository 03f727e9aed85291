"""Spans of a choice's tokens by ART's policy that made them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlx_parallm.api.control.art.policies import Policies
from mlx_parallm.api.turns.samples import VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpans:
    """Writes a choice's versions in ART's form.

    Attributes:
        policies: the known policies, by label.
        slot: the name of the adapter or model.
        label: the weights' label when the request came, for a choice without tokens.
        num_prompt_tokens: tokens of the prompt.
    """

    policies: Policies
    slot: str
    label: str
    num_prompt_tokens: int

    def of(self, versions: VersionSpans) -> dict[str, Any]:
        """Return the two fields of a choice.

        ``policy_token_spans`` partition its tokens. ``prompt_policy_token_spans`` partition the
        prompt's tokens but the first, which nothing predicts. When weights change during a prompt,
        all of it is recomputed, so that it has the version of the first token.
        """
        made = [
            self._span(span["version"], span["start"], span["end"]) for span in versions.to_json()
        ]
        label = versions.labels[0] if versions.labels else self.label
        prompt = [self._span(label, 1, self.num_prompt_tokens)]
        return {
            "policy_token_spans": made,
            "prompt_policy_token_spans": prompt if self.num_prompt_tokens > 1 else [],
        }

    def _span(self, label: str, start: int, end: int) -> dict[str, Any]:
        policy = asdict(self.policies.of(self.slot, label))
        return {"start_token": start, "end_token": end, **policy}
