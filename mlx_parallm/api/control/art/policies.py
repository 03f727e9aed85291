"""Versions of adapters in ART's terms: generations of a slot, each with its training step.

The terms come from the server that ART ships (openpipe-art 0.5.23, ``art_vllm_runtime``): a slot is
the name that requests use, and an update moves it from one generation to the next.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import override

from mlx_parallm.api.turns.samples import VersionSpans
from mlx_parallm.peers.requests import Shared
from mlx_parallm.types.errors import InvalidRequestError

#: MAX_REMEMBERED: operations and generations that are kept; the oldest are forgotten first.
MAX_REMEMBERED = 4096
_STEP = re.compile(r"@(\d{1,18})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A state of an adapter, as ART identifies it.

    Attributes:
        generation_id: unique within its slot; the label of its weights.
        policy_version: its training step.
        lora_slot: the name that requests use.
        update_seq: grows with every update; 0 if no update of ART's brought it.
    """

    generation_id: str
    policy_version: int
    lora_slot: str
    update_seq: int


@dataclass(slots=True, eq=False)
class ArtPolicies(Shared):
    """The generations of all slots. It is used on the event loop only.

    Attributes:
        lock: held during an update, so that updates run one after another.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _known: OrderedDict[tuple[str, str], Policy] = field(
        default_factory=OrderedDict[tuple[str, str], Policy]
    )
    # The request and the answer of each operation.
    _receipts: OrderedDict[str, tuple[Mapping[str, Any], Any]] = field(
        default_factory=OrderedDict[str, tuple[Mapping[str, Any], Any]]
    )
    _num_updates: int = 0
    _num_changes: int = 0

    @property
    @override
    def number(self) -> int:
        return self._num_changes

    def value(self) -> Mapping[tuple[str, str], Policy]:
        """Return the known generations, for ``replace`` in another process."""
        return dict(self._known)

    def replace(self, known: Mapping[tuple[str, str], Policy]) -> None:
        """Know the generations that another process knows."""
        self._known = OrderedDict(known)

    def find(self, slot: str, label: str) -> Policy | None:
        """Return the generation whose weights have this label, if an update of ART's brought it."""
        return self._known.get((slot, label))

    def of(self, slot: str, label: str) -> Policy:
        """Return the generation of any adapter or model; without ART, of its name and label."""
        known = self.find(slot, label)
        if known is not None:
            return known
        step = _STEP.search(slot) or _STEP.search(label)
        return Policy(
            generation_id=f"{slot}/{label}",
            policy_version=int(step[1]) if step else 0,
            lora_slot=slot,
            update_seq=0,
        )

    def begin(self, slot: str, generation_id: str, policy_version: int) -> Policy:
        """Record a generation before its first token; call ``forget`` if loading fails."""
        self._num_updates += 1
        policy = Policy(
            generation_id=generation_id,
            policy_version=policy_version,
            lora_slot=slot,
            update_seq=self._num_updates,
        )
        self._num_changes += 1
        self._known[slot, generation_id] = policy
        _trim(self._known)
        return policy

    def forget(self, policy: Policy) -> None:
        """Forget a generation that was not loaded."""
        self._num_changes += 1
        self._known.pop((policy.lora_slot, policy.generation_id), None)

    def result_of(self, operation_id: str, request: Mapping[str, Any]) -> Any:
        """Return the answer of an operation that is repeated; None if it is new.

        Raises:
            InvalidRequestError: another request had this id.
        """
        settled, result = self._receipts.get(operation_id, (request, None))
        if settled != request:
            raise InvalidRequestError(
                "Another update already had this operation_id.",
                param="operation_id",
                code="idempotency_conflict",
            )
        return result

    def settle(self, operation_id: str, request: Mapping[str, Any], result: Any) -> None:
        """Record the answer of an operation."""
        self._receipts[operation_id] = (request, result)
        _trim(self._receipts)


def _trim(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpans:
    """Writes a choice's versions in ART's form.

    Attributes:
        policies: the known policies, by label.
        slot: the name of the adapter or model.
        label: the weights' label when the request came, for a choice without tokens.
        num_prompt_tokens: tokens of the prompt.
    """

    policies: ArtPolicies
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
