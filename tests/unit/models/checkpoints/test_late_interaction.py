"""Late interaction: what files say of it, and the score itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.vectors.late_interaction import compared, max_sim, side_inputs
from mlx_parallm.models.checkpoints.late_interaction import LateSpec, read_late_spec
from mlx_parallm.pooling.pending import with_late_interaction
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import LateInteraction, PoolingInput
from tests.encoder_requests import post, refused_field
from tests.fake_encoders import CLS, MASK, SEP, FakeEncoders, WordEncoder, make_encoder

VECTORS = st.integers(1, 6).flatmap(
    lambda rows: arrays(np.float64, (rows, 3), elements=st.floats(-1, 1))
)


@given(VECTORS, VECTORS)
def test_max_sim_is_its_definition(query: np.ndarray, document: np.ndarray) -> None:
    best = [max(float(token @ other) for other in document) for token in query]
    assert max_sim(query, document) == pytest.approx(sum(best))
    assert max_sim(query, document, is_mean=True) == pytest.approx(sum(best) / len(best))


def test_what_has_no_token_left_fits_nothing() -> None:
    document = PoolingInput((7, 8, 7), "token_embed")
    vectors = np.array([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]])
    np.testing.assert_allclose(compared(document, vectors, frozenset({8})), [[0.6, 0.8], [1, 0]])
    nothing = compared(document, vectors, frozenset({7, 8}))
    assert max_sim(vectors, nothing) == max_sim(nothing, vectors) == 0


async def test_queries_are_marked_and_filled_up() -> None:
    late = LateInteraction(
        query_prefix=(50,), query_length=6, expands_to=6, expansion_id=MASK, is_mean=True
    )
    model = make_encoder(late=late, prompts={"query": "w60 "})
    (side,) = await side_inputs(["w7"], model, "query", Reading())
    assert side.token_ids == (CLS, 50, 60, 7, SEP, MASK)
    assert (side.num_unattended, side.task) == (1, "token_embed")
    (side,) = await side_inputs(["w7 w8 w9"], model, "query", Reading(truncate=-1))
    assert (len(side.token_ids), side.num_unattended) == (6, 0)


def resolved(spec: LateSpec, *, reads_on: bool = False, **facts: Any) -> Any:
    model = make_encoder(**facts)
    return with_late_interaction(model.info, spec, model.tokenizer, reads_on=reads_on)


def test_a_mark_that_is_no_token_is_a_text() -> None:
    class Words(WordEncoder):
        def token_id(self, token: str) -> int | None:
            return self._ids(token)[0] if token.startswith("w") else None

    spec = LateSpec(
        query_prefix="w50 ", document_prefix="[D] ", skipped=("w9", "?"), expansion_token="w8"
    )
    tokenizer = cast("EncoderTokenizer", Words())
    info = with_late_interaction(
        make_encoder(prompts={"document": "w7"}).info, spec, tokenizer, reads_on=True
    )
    assert info.late is not None
    assert (info.late.query_prefix, info.late.document_prefix) == ((50,), ())
    assert info.prompts == {"document": "[D] w7"}
    assert (info.late.skipped_ids, info.late.expansion_id) == ({9}, None)


def test_what_cannot_be_read_is_refused() -> None:
    expands = LateInteraction(expands_to=8)
    assert resolved(LateSpec(settings=expands)).late.expansion_id == MASK
    with pytest.raises(ModelLoadError, match="causal"):
        resolved(LateSpec(settings=expands), reads_on=True)
    attends = LateInteraction(expands_to=8, attends_to_expansion=True)
    assert resolved(LateSpec(settings=attends), reads_on=True).late.attends_to_expansion


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ({"keep_only_token_ids": [1]}, "keep_only_token_ids"),
        ({"skiplist_words": ["."], "skiplist_tasks": ["query"]}, "skiplist"),
    ],
)
def test_masks_that_are_not_served(tmp_path: Path, mask: Any, reason: str) -> None:
    kind = "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "m", "type": kind}]))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(mask))
    with pytest.raises(ModelLoadError, match=reason):
        read_late_spec(tmp_path)


def test_a_folder_that_says_nothing_is_read_as_any_text(tmp_path: Path) -> None:
    assert read_late_spec(tmp_path) == LateSpec()


def test_pylate_may_leave_queries_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"model_type": "ColBERT", "do_query_expansion": False}))
    spec = read_late_spec(tmp_path)
    assert (spec.settings.expands_to, spec.settings.query_length) == (0, 32)
    assert (spec.settings.document_length, len(spec.skipped)) == (180, 32)


async def test_a_document_of_which_nothing_counts_has_no_vectors() -> None:
    late = LateInteraction(skipped_ids=frozenset({CLS, 7, SEP}))
    served = FakeEncoders(make_encoder(tasks=("token_embed",), late=late))
    body = {"input": ["w7", "w7 w8"], "input_type": "document"}
    data = (await post(served, "/pooling", body)).json()["data"]
    assert [len(entry["data"]) for entry in data] == [0, 1]


@pytest.mark.parametrize(
    "field", [{"truncation_side": "left"}, {"add_special_tokens": False}], ids=str
)
async def test_what_a_side_does_not_heed_is_refused(field: dict[str, Any]) -> None:
    served = FakeEncoders(make_encoder(tasks=("token_embed",), late=LateInteraction()))
    body = {"input": "w7", "input_type": "document"}
    answer = await post(served, "/pooling", body | field)
    assert refused_field(answer) == (400, *field)
    assert (await post(served, "/pooling", body)).status_code == 200


async def test_a_model_that_was_made_for_vectors_ranks_first() -> None:
    masked = make_encoder("masked", tasks=("mlm", "embed"))
    tokens = make_encoder("tokens", tasks=("token_embed", "embed"), late=LateInteraction())
    cross = make_encoder("cross", tasks=("classify",), labels=("fits",))
    body = {"query": "w5", "documents": ["w6", "w7"]}
    for served, chosen in [
        ([masked, tokens], "tokens"),
        ([masked], "masked"),
        ([masked, tokens, cross], "cross"),
    ]:
        answer = await post(FakeEncoders(*served), "/rerank", body)
        assert answer.json()["model"] == chosen
