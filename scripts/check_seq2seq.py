"""A comparison of an encoder-decoder's greedy tokens with those of transformers, on 20 sources.

    make check-seq2seq MODEL=folder [ARGS="--src-lang en --tgt-lang de --prefix 'summarize: '"]

Both sides compute in float32 with the lengths and forced tokens of ``generation_config.json``, and
one beam. transformers runs in an environment of its own, by
``python -m scripts.check_seq2seq_peer``. Tokens may differ from a place on where transformers' two
best logits are as close as rounding; ids of the sources must be equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.llm import LLM
from mlx_parallm.types.request import SamplingParams
from scripts.varied_texts import varied_texts

SOURCES = 20
NEW_TOKENS = 64
#: ``NEAR``: logits closer than this share of the largest are a near tie.
NEAR = 1e-3
EQUAL, WRONG = "equal", "wrong"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one side for a source.

    Attributes:
        source: token ids of the source.
        tokens: those of the decoder, its start included.
        gaps: of transformers, how far its two best logits are apart before each token behind the
            start, as a share of the largest; empty for this package.
    """

    source: Sequence[int]
    tokens: Sequence[int]
    gaps: Sequence[float] = ()


def main() -> None:
    """Print how many sources agree; exit with status 1 if one does not."""
    parser = argparse.ArgumentParser(description="An encoder-decoder against transformers.")
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--peer", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--src-lang", help="language of the sources")
    parser.add_argument("--tgt-lang", help="language to translate to")
    parser.add_argument("--prefix", default="", help="text before each source")
    args = parser.parse_args()
    texts = [args.prefix + text for text in sources()]
    languages = {"src_lang": args.src_lang, "tgt_lang": args.tgt_lang}
    own = own_answers(args.model, texts, languages)
    peers = peer_answers(args.peer, args.model, texts, languages)
    verdicts = [verdict(mine, peer) for mine, peer in zip(own, peers, strict=True)]
    for text, result in zip(texts, verdicts, strict=True):
        if result != EQUAL:
            print(f"{text[:60]!r}: {result}")
    num_wrong = sum(result.startswith(WRONG) for result in verdicts)
    print(f"{len(texts)} sources: {verdicts.count(EQUAL)} equal, {num_wrong} wrong")
    if num_wrong:
        sys.exit(1)


def sources() -> list[str]:
    """Return texts of several scripts and lengths, none of them empty."""
    texts = [text for text in varied_texts(60) if text.strip()]
    return texts[:: len(texts) // SOURCES][:SOURCES]


def own_answers(
    folder: Path, texts: Sequence[str], languages: Mapping[str, str | None]
) -> list[Answer]:
    """Return what this package makes of all sources at once."""
    named = {name: language for name, language in languages.items() if language}
    prompts = [{"encoder_prompt": text, **named} for text in texts]
    with LLM(str(folder), dtype="float32") as llm:
        starts = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
        # A forced language is a token of the prompt here, and a new one in transformers.
        limits = [NEW_TOKENS + 1 - len(output.prompt_token_ids) for output in starts]
        params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in limits]
        outputs = llm.generate(prompts, params)
    return [
        Answer(
            source=output.encoder_prompt_token_ids or (),
            tokens=[*output.prompt_token_ids, *output.outputs[0].token_ids],
        )
        for output in outputs
    ]


def peer_answers(
    python: str, folder: Path, texts: Sequence[str], languages: Mapping[str, str | None]
) -> list[Answer]:
    """Return what transformers makes of each source alone."""
    with tempfile.TemporaryDirectory() as place:
        questions, answers = Path(place, "questions.json"), Path(place, "answers.json")
        content = {"texts": list(texts), "new_tokens": NEW_TOKENS, **languages}
        questions.write_text(json.dumps(content), encoding="utf-8")
        command = [python, "-m", "scripts.check_seq2seq_peer", folder.resolve(), questions, answers]
        subprocess.run(command, check=True)
        rows: list[dict[str, Any]] = json.loads(answers.read_text(encoding="utf-8"))
    return [Answer(**row) for row in rows]


def verdict(own: Answer, peer: Answer) -> str:
    """Return ``EQUAL``, or what differs; it begins with ``WRONG`` unless rounding explains it."""
    if list(own.source) != list(peer.source):
        return f"{WRONG}: the source is {asdict(own)['source']}, not {peer.source}"
    if list(own.tokens) == list(peer.tokens):
        return EQUAL
    pairs = list(zip(own.tokens, peer.tokens, strict=False))
    place = next((i for i, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
    # The start has no gap.
    gap = peer.gaps[place - 1] if 0 < place <= len(peer.gaps) else 1.0
    kind = "near tie" if gap < NEAR else WRONG
    return f"{kind}: token {place} differs, where two logits are {gap:.1e} apart"


if __name__ == "__main__":
    main()
