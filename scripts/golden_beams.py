"""A writer of what transformers' beam search finds in tiny models: tests/golden/beams.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_beams [--only part-of-a-name]

Decoders are those of tests/golden/families, encoder-decoders those of tests/golden/seq2seq. Every
search has a prompt, which is the source of an encoder-decoder, the settings that differ from the
defaults, and the hypotheses that it returns, best first: their tokens and scores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import save_file

from tests.golden_weights import golden_weight

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
DECODERS = ("llama", "qwen3", "gpt2")
ENCODER_DECODERS = ("t5_v1_1", "bart", "nllb")
NUM_PROMPTS = 20
MAX_TOKENS = 12
WIDTHS = range(1, 9)
LENGTH_PENALTIES = (-1.0, 0.0, 1.0, 2.0)
EARLY_STOPPING = (True, False, "never")
#: ``END_IDS``: with one token, searches of random weights would hardly ever end.
END_IDS = [2, 7, 11, 19, 23]
#: ``FURTHER``: settings besides those of beams; they take turns.
FURTHER: tuple[dict[str, Any], ...] = (
    {},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5},
    {},
    {"repetition_penalty": 1.3},
    {"forced_eos_token_id": 2},
    {"eos_token_id": [2]},
)
SOURCE_FURTHER: tuple[dict[str, Any], ...] = (
    {},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5},
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": 2},
    {"eos_token_id": [2]},
    {"no_repeat_ngram_size": 2, "renormalize_logits": True},
)


def main() -> None:
    """Write a file for each model, or for those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of beam search.")
    parser.add_argument("--only", default="", help="a part of the names of the models")
    only = parser.parse_args().only
    folder = GOLDEN / "beams"
    folder.mkdir(exist_ok=True)
    for name in (*DECODERS, *ENCODER_DECODERS):
        if only not in name:
            continue
        searches = [json.dumps(search) for search in searches_of(model_of(name))]
        text = "[\n" + ",\n".join(searches) + "\n]\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {len(searches)} searches, {len(text)} bytes")


def model_of(name: str) -> Any:
    """Return a model of transformers with golden weights, in float64."""
    is_decoder = name in DECODERS
    kind = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModelForSeq2SeqLM
    part = "families" if is_decoder else "seq2seq"
    golden = json.loads((GOLDEN / part / f"{name}.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(golden["config"]), encoding="utf-8")
        weights = {
            key: np.asarray(golden_weight(key, shape)) for key, shape in golden["weights"].items()
        }
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        model: Any = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float64
        ).eval()
    for field in ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"):
        setattr(model.generation_config, field, None)
    return model


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Return prompts of 1 to 39 tokens."""
    random = np.random.RandomState(5)
    return [random.randint(3, vocab_size, 1 + 2 * number).tolist() for number in range(NUM_PROMPTS)]


def searches_of(model: Any) -> list[dict[str, Any]]:
    """Return one search for each combination of settings; prompts and others take turns."""
    prompts = prompts_of(model.config.vocab_size)
    settings = product(WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING)
    further = SOURCE_FURTHER if model.config.is_encoder_decoder else FURTHER
    return [
        search(model, prompts[number % NUM_PROMPTS], *each, further[number % len(further)])
        for number, each in enumerate(settings)
    ]


def search(
    model: Any,
    prompt: list[int],
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
    further: dict[str, Any],
) -> dict[str, Any]:
    """Return a search and all hypotheses that it finds."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=MAX_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=-1,
        **{
            "eos_token_id": END_IDS,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            **further,
        },
    )
    length = 1 if model.config.is_encoder_decoder else len(prompt)
    tokens = output.sequences.tolist()
    if width == 1:
        scores = [_greedy_score(output, length, length_penalty)]
    else:
        scores = output.sequences_scores.tolist()
    hypotheses = [
        ([token for token in row[length:] if token >= 0], round(score, 6))
        for row, score in zip(tokens, scores, strict=True)
    ]
    return {
        "prompt": prompt,
        "width": width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "max_new_tokens": MAX_TOKENS,
        "eos_token_id": END_IDS,
        **further,
        "hypotheses": hypotheses,
    }


def _greedy_score(output: Any, prompt_len: int, length_penalty: float) -> float:
    """Return the score of a search with one beam, which transformers does greedily.

    Its logits are processed before they become log-probabilities.
    """
    chosen = output.sequences[0, prompt_len:].tolist()
    logs = [torch.log_softmax(step[0], -1) for step in output.scores]
    total = sum(log[token].item() for log, token in zip(logs, chosen, strict=True))
    return total / len(chosen) ** length_penalty


if __name__ == "__main__":
    main()
