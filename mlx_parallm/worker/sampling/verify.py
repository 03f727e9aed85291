"""Decides which proposals stand, after the sampler has chosen a token for every row.

Each row samples by its own key (seed, position), whatever was proposed; a proposal stands if it
equals the choice of the row before it. For a deterministic proposal x this is rejection sampling: x
is accepted with probability p(x), and otherwise the choice follows p without x, renormalised. For a
draft model that samples with the same key it is the Gumbel coupling of the two distributions
(Daliri, Musco and Suresh, arXiv:2408.07978). Either way a sequence gets exactly the tokens that it
gets without proposals.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.types.step import SampledToken


def count_accepted(chosen: Sequence[int], proposals: Sequence[int]) -> int:
    """Return how many proposals, from the first on, equal the token chosen in their place.

    ``chosen[i]`` follows the first i proposals.
    """
    for count, (token, proposal) in enumerate(zip(chosen, proposals, strict=False)):
        if token != proposal:
            return count
    return len(proposals)


def keep_valid(
    tokens: Sequence[SampledToken], proposals: Sequence[Sequence[int]]
) -> tuple[SampledToken, ...]:
    """Return the tokens without those chosen after a refused proposal.

    Args:
        tokens: for each sequence, one after its last token and one after each proposal.
        proposals: the proposals of each sequence.
    """
    kept: list[SampledToken] = []
    first = 0
    for mine in proposals:
        end = first + 1 + len(mine)
        chosen = [token.token_id for token in tokens[first:end]]
        kept += tokens[first : first + 1 + count_accepted(chosen, mine)]
        first = end
    return tuple(kept)
