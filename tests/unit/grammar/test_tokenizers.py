"""Grammars over a SentencePiece vocabulary, whose spaces and bytes are written in other ways."""

from __future__ import annotations

import json
import random

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from tests.task_tokenizers import unigram

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "é": {"enum": ["é", "日本", "a b"]},
    },
    "required": ["name", "é"],
    "additionalProperties": False,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
END = 2


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's: a space is U+2581, and bytes write what no token has."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    text = '{"name": "ab", "x": 12}  hello world this is a test of things'
    tokenizer.train_from_iterator([text] * 50, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in BYTES
    ]
    return Tokenizer.from_str(json.dumps(content))


def test_random_answers_are_valid() -> None:
    tokenizer = sentencepiece_tokenizer()
    size = tokenizer.get_vocab_size()
    vocabulary = GrammarVocabulary(tokenizer.to_str(), frozenset([END]), size + 5, size)
    compiler = GrammarCompiler(vocabulary)
    text = compiler.compile(specs.json_schema(SCHEMA))
    for seed in range(10):
        draw, matcher, output = random.Random(seed), compiler.matcher(text), []
        while not output or output[-1] != END:
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            output.append(draw.choice(np.flatnonzero(bits).tolist()))
            assert matcher.consume_token(output[-1])
        value = json.loads(tokenizer.decode(output))
        assert list(value) == ["name", "é"]
        assert len(value["name"]) <= 6
        assert value["é"] in ("é", "日本", "a b")


def test_answers_of_a_tokenizer_whose_decoder_llguidance_does_not_know() -> None:
    tokenizer, _ = unigram()
    size = tokenizer.get_vocab_size()
    vocabulary = GrammarVocabulary(tokenizer.to_str(), frozenset([END]), size, size)
    compiler = GrammarCompiler(vocabulary)
    matcher = compiler.matcher(compiler.compile(specs.choice(["the cat", "a dog"])))
    for token in ("t", "h", "e", "\u2581cat"):
        token_id = tokenizer.token_to_id(token)
        assert token_id is not None
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()
