"""`kp-worker doctor` loads the real model."""

from __future__ import annotations

from tests.support.commands import Diagnosis


def test_the_model_is_loaded_and_timed() -> None:
    diagnosis = Diagnosis({"KP_BOOTSTRAP_SERVERS": "127.0.0.1:1", "KP_EMBEDDER": "auto"})
    assert diagnosis.of("model")[0][1].startswith("all-MiniLM-L6-v2 (")
    assert "a text of 256 tokens takes" in diagnosis.of("embedding")[0][1]
    assert "fp32" in diagnosis.of("precision")[0][1]
