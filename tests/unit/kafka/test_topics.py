"""What the settings of topics say; tests/kafka/test_topics.py has real ones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from worker.config import load
from worker.kafka.cluster.topics import AFTER, NO_LIMIT, Observed, _small_outputs


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), ("-1", math.inf), (str(NO_LIMIT), math.inf), (str(NO_LIMIT - 1), NO_LIMIT - 1), ("0", 0)],
)
def test_a_limit_in_milliseconds(text: str | None, expected: float | None) -> None:
    observed = Observed({}, [], {"traces": {} if text is None else {AFTER: text}}, {})
    assert observed.milliseconds("traces", AFTER) == expected
    assert observed.milliseconds("another", AFTER) is None


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((1200, 1200), "traces.accepted has max.message.bytes=1200 and traces.rejected has max.message.bytes=1200: a"),
        ((2_000_000, 20_000), "traces.rejected has max.message.bytes=20000: a scored trace that had more than 11808"),
        ((1_056_768, 1_056_768), None),
    ],
)
def test_outputs_that_are_too_small(limits: tuple[int, int], said: str | None) -> None:
    settings = load(accepted_topic="traces.accepted", rejected_topic="traces.rejected")
    names = (settings.accepted_topic, settings.rejected_topic)
    topics = {name: SimpleNamespace(partitions=1) for name in names}
    configs = {name: {"max.message.bytes": str(limit)} for name, limit in zip(names, limits, strict=True)}
    found = Observed(topics, [], configs, {})  # type: ignore[arg-type]
    problems = list(_small_outputs(settings, found, 0))
    assert len(problems) == (said is not None)
    for problem in problems:
        assert problem.message.startswith(f"{said} ")
        assert problem.message.endswith("may not fit, and then becomes a dead letter (too_large)")
        assert "set max.message.bytes=1056768 on " in problem.remedy
