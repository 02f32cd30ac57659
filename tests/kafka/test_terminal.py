"""No command that reads Kafka lets a control through to a terminal or a pipe."""

import json
import re
from typing import Any

import pytest

from tests.support.builders import T0
from tests.support.kafka_fixtures import commit_offset, create_topics, produce
from tests.support.stage import Desk
from tests.support.terminal import (
    EVIL,
    ON_KAFKA,
    controls,
    evil_entry,
    evil_files,
    evil_letter,
    evil_outputs,
    in_pipes,
    on_terminal,
)
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return evil_files(tmp_path_factory.mktemp("evil"))


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    desk = Desk(kafka)
    for number, output in enumerate(evil_outputs()):
        row = (EVIL.encode(), output.value, [*output.headers, (EVIL, EVIL.encode())], number % 2, T0)
        produce(desk.bootstrap, desk.topics[output.kind], [row])
    letter = evil_letter()
    source = desk.name.encode()
    headers = [(name, source if name == "kp-source-topic" else value) for name, value in letter.headers]
    another = [(name, EVIL.encode() if name == "kp-error-reason" else value) for name, value in headers]
    rows = [(letter.key, letter.value, chosen, 0, T0) for chosen in (headers, another, headers * 2)]
    produce(desk.bootstrap, desk.topics["dead-letter"], rows)
    create_topics(desk.bootstrap, {f"{desk.name}-novelty-changelog": (2, {"cleanup.policy": "compact"})})
    produce(desk.bootstrap, f"{desk.name}-novelty-changelog", [(b"1:2024:0", evil_entry(), (), 0, T0)])
    produce(desk.bootstrap, desk.name, [(None, b"{}", (), 0)])
    commit_offset(desk.bootstrap, desk.name, desk.name, 1, metadata="kp2:::1:0")  # so that the entry below it counts
    return desk


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("command", "terminal"),
    [*((command, False) for command in ON_KAFKA), *((command, True) for command in ON_KAFKA if command != "report")],
)
def test_nor_does_one_that_reads_kafka(command: str, terminal: bool, files: dict[str, str], desk: Desk) -> None:
    args = [argument.format(**files) if argument.startswith("{") else argument for argument in ON_KAFKA[command]]
    settings = {"KP_MODEL": f"/nowhere/{EVIL}", "KP_EMBEDDER": "auto"} if command == "doctor" else {}
    ran = (on_terminal if terminal else in_pipes)(desk.env | settings, *args)
    assert "Traceback" not in ran.text
    assert controls(ran.text) <= {"\n"}
    silent = command in ("topics", "redrive --to-source")
    assert silent or re.search(r"\\+(x1b|u001b|x7f|u202e)", ran.text) is not None, ran.text[:2000]
    if command.startswith("tail") and not terminal:
        texts = [text for line in ran.text.splitlines() for text in _values(json.loads(line))]
        assert any(EVIL in text for text in texts), "the same JSON"


def _values(document: Any) -> list[str]:
    """Return every text in a document."""
    if isinstance(document, str):
        return [document]
    items = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return [text for item in items for text in _values(item)]
