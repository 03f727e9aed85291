"""``LLM(data_parallel_size=2).mezo``: a session lives on one engine and publishes to both."""

from __future__ import annotations

import pytest

from mlx_parallm.llm import LLM
from tests.integration.test_llm_mezo import OBJECTIVE, ROWS, SETTINGS, served_loss

pytestmark = pytest.mark.slow


def test_a_session_of_two_engines_is_that_of_one() -> None:
    with LLM("demo:mlm") as llm, llm.mezo(OBJECTIVE, ROWS, **SETTINGS) as session:
        session.run(300)
        log = session.log()
    with LLM("demo:mlm", data_parallel_size=2) as llm:
        with llm.mezo(OBJECTIVE, ROWS, **SETTINGS) as session:
            session.run(300)
            assert len(session.log()) == len(log)
            trained = session.evaluate(ROWS).loss
            session.publish("film")
        # Texts are shared out among both engines.
        assert served_loss(llm, "film") == pytest.approx(trained, abs=1e-4)
        assert served_loss(llm) > 1.5 * trained
