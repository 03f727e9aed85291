"""The part of ``scripts/check_seq2seq.py`` that runs transformers; it needs torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers


def main() -> None:
    """Write answers; arguments are the model's folder, the questions, and the output."""
    folder, questions, output = sys.argv[1:]
    content = json.loads(Path(questions).read_text(encoding="utf-8"))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    source, target = content["src_lang"], content["tgt_lang"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        folder, **({"src_lang": source} if source else {})
    )
    # Decoder tokens of the first mBART begin with the language.
    has_start = model.generation_config.decoder_start_token_id is not None
    name = "forced_bos_token_id" if has_start else "decoder_start_token_id"
    forced = {name: _language(tokenizer, target)} if target else {}
    options = {"max_new_tokens": content["new_tokens"], **forced}
    answers = [_answer(model, tokenizer, text, options) for text in content["texts"]]
    Path(output).write_text(json.dumps(answers), encoding="utf-8")


def _language(tokenizer: Any, language: str) -> int:
    codes = getattr(tokenizer, "lang_code_to_token", None) or {}
    return int(tokenizer.convert_tokens_to_ids(codes.get(language, language)))


def _answer(model: Any, tokenizer: Any, text: str, options: dict[str, Any]) -> dict[str, Any]:
    ids = tokenizer(text, return_tensors="pt").input_ids
    # A cache that takes its layers from the config has as many as the encoder.
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    with torch.no_grad():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            num_beams=1,
            do_sample=False,
            no_repeat_ngram_size=0,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return {
        "source": ids[0].tolist(),
        "tokens": result.sequences[0].tolist(),
        "gaps": [_gap(row[0]) for row in result.logits],
    }


def _gap(logits: Any) -> float:
    best, second = logits.topk(2).values
    return float((best - second) / logits.abs().max())


if __name__ == "__main__":
    main()
