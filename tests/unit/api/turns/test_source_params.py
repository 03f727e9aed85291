"""Parameters of every route have what an encoder-decoder's files say of its outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.api.turns.sources import source_params
from mlx_parallm.tokenizer.seq2seq.languages import NoLanguages
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.request import SamplingParams
from tests.fake_seq2seq import RULES, SourceBytes, seq2seq_model


@pytest.mark.parametrize("renormalizes", [True, False])
def test_beams_are_normalised_again_if_the_files_say_so(renormalizes: bool) -> None:
    tokenizer: Any = SourceBytes()
    defaults = replace(RULES.defaults, renormalize_logits=renormalizes)
    rules = replace(RULES, defaults=defaults)
    sides = Seq2SeqTokenizer(tokenizer, tokenizer, rules, NoLanguages())
    model = replace(seq2seq_model(), seq2seq=sides)
    params = SamplingParams(temperature=0.0, beams=BeamParams(width=3))
    read = source_params(params, model, 1, named=())
    assert read.beams == BeamParams(width=3, renormalizes=renormalizes)
    assert source_params(SamplingParams(), model, 1, named=()).beams is None
