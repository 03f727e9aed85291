"""A writer of the texts that tiny encoder-decoders make: tests/golden/seq2seq_texts.json.

Run it by hand, in the environment of ``scripts/golden_beams.py`` with sentencepiece==0.2.3:

    /tmp/golden/bin/python -m scripts.golden_seq2seq_texts

Their tokenizers are those of ``tests/builders/seq2seq_folders.py``. The file has the shapes of each
checkpoint's arrays, whose values ``tests/golden_weights.py`` makes of their names.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.builders.seq2seq_folders import transformers_tokenizer
from tests.golden_weights import golden_weight
from tests.seq2seq_texts import CASES, TEXTS, WIDTHS, TextCase

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


def main() -> None:
    """Write the texts of all cases."""
    lines = {name: texts_of(case) for name, case in CASES.items()}
    rows = [f"{json.dumps(name)}: {json.dumps(line)}" for name, line in lines.items()]
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    (GOLDEN / "seq2seq_texts.json").write_text(text, encoding="utf-8")
    print(f"{len(rows)} cases, {len(text)} bytes")


def texts_of(case: TextCase) -> dict[str, Any]:
    """Return the shapes of a case's arrays and what it makes of each text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.write(folder)
        shapes = _shapes(folder)
        save_file(
            {key: golden_weight(key, tuple(shape)) for key, shape in shapes.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval().double()
        tokenizer = transformers_tokenizer(folder)
        outputs = [
            {"text": text, "width": width, "output": _output(case, model, tokenizer, text, width)}
            for width in WIDTHS
            for text in TEXTS
        ]
    return {"shapes": shapes, "outputs": outputs}


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the arrays that transformers saves."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as name:
        transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(name)
        with safe_open(Path(name) / "model.safetensors", "np") as file:
            return {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _output(case: TextCase, model: Any, tokenizer: Any, text: str, width: int) -> str:
    options: dict[str, Any] = {"num_beams": width}
    if "src_lang" in case.languages:
        inputs = tokenizer._build_translation_inputs(text, return_tensors="pt", **case.languages)
        language = inputs.pop("forced_bos_token_id")
        # mBART was trained with the language in place of the start token.
        place = "decoder_start" if case.family == "mbart" else "forced_bos"
        options[f"{place}_token_id"] = language
    else:
        inputs = tokenizer(case.before + text, return_tensors="pt")
    with torch.no_grad():
        (ids,) = model.generate(inputs["input_ids"], **options).tolist()
    if case.family == "marian":
        return tokenizer.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    main()
