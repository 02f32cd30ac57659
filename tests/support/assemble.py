"""`kp-worker assemble` as processes on topics of spans, and a judgement on the traces that come out."""

import base64
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import spans
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce, unique, wait_until
from tests.support.surroundings import topic_settings
from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.runs.otlp.mapping import assembled
from worker.runs.otlp.spans import LogEvent, Span, decoded


class Workshop:
    """The topics of one test, and the settings of its `assemble`. The grace period and the gap are seconds.

    `create`: whether the topics with spans are there from the start.
    """

    def __init__(
        self, bootstrap: str, partitions: int = 3, grace: float = 2, gap: float = 8, *, create: bool = True,
        **settings: str,
    ) -> None:  # fmt: skip
        self.bootstrap = bootstrap
        self.name = unique("workshop")
        self.spans = f"{self.name}.spans"
        self.traces = f"{self.name}.traces"
        self.dead = f"{self.name}.dead"
        self.partitions = partitions
        self.env = topic_settings(bootstrap, self.name) | {
            "KP_SPANS_TOPIC": self.spans, "KP_SOURCE_TOPIC": self.traces, "KP_DEAD_LETTER_TOPIC": self.dead,
            "KP_TOPIC_PARTITIONS": "2", "KP_ASSEMBLE_GRACE_SECONDS": f"{grace:g}",
            "KP_ASSEMBLE_GAP_SECONDS": f"{gap:g}", "KP_COMMIT_INTERVAL_SECONDS": "0.2",
            "KP_SESSION_TIMEOUT_SECONDS": "6", **spans.SETTINGS, **settings,
        }  # fmt: skip
        if create:
            create_topics(bootstrap, dict.fromkeys(self.env["KP_SPANS_TOPIC"].split(","), partitions))

    def put(self, values: Sequence[bytes], topic: str | None = None, **record: Any) -> None:
        """Write records of spans, in turn to each partition."""
        rows = [(None, value, (), number % self.partitions, *record.values()) for number, value in enumerate(values)]
        produce(self.bootstrap, topic or self.spans, rows)

    def start(self, log_path: Path | None = None) -> WorkerProcess:
        return WorkerProcess(self.env, ("assemble",), log_path=log_path)

    def documents(self) -> list[bytes]:
        """Return the traces so far."""
        return [each.value for each in consume_all(self.bootstrap, self.traces)]

    def letters(self) -> list[Any]:
        return consume_all(self.bootstrap, self.dead)

    def wait(self, count: int, timeout: float = 60.0) -> list[bytes]:
        """Return the traces, as soon as there are so many."""
        assert wait_until(lambda: len(self.documents()) >= count, timeout, 0.2), f"{len(self.documents())} of {count}"
        return self.documents()


def expected_documents(values: Iterable[bytes], limits: Limits = DEFAULT_LIMITS) -> list[bytes]:
    """Return the traces of records of spans and logs by trace id, without any Kafka between."""
    spans_of: dict[str, list[Span]] = defaultdict(list)
    logs: dict[str, list[LogEvent]] = defaultdict(list)
    for value in values:
        read = decoded(value)
        for span in read.spans:
            spans_of[span.trace_id].append(span)
        for log in read.logs:
            logs[log.trace_id].append(log)
    rules = replace(spans.RULES, limits=limits)
    made = (assembled(each, logs[trace_id], rules) for trace_id, each in spans_of.items())
    return [each.value for several in made for each in several if each.value is not None]


def shared_records(paths: Iterable[Path]) -> list[bytes]:
    """Return the values of records that are kept as JSON Lines: {"value": base64, ...}."""
    lines = (json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines())
    return [base64.b64decode(line["value"]) for line in lines if "value" in line]


def by_run(values: Iterable[bytes]) -> list[list[bytes]]:
    """Return records in groups that have no trace in common: a record may have spans of several."""
    groups: list[tuple[set[str], list[bytes]]] = []
    for value in values:
        read = decoded(value)
        ids = {span.trace_id for span in read.spans} | {log.trace_id for log in read.logs}
        common = [group for group in groups if group[0] & ids]
        groups = [group for group in groups if not group[0] & ids]
        groups.append((ids.union(*(each for each, _ in common)), [*itertools.chain(*(v for _, v in common)), value]))
    return [values for _, values in groups]


def made_records(rng: random.Random, runs: int, size: int = 0) -> list[list[bytes]]:
    """Return records of made-up runs, a list for each run; both encodings are mixed."""
    return [spans.records(spans.run_spans(number, rng.randint(1, 4), size=size), rng) for number in range(runs)]


def judged(workshop: Workshop, expected: Sequence[bytes]) -> dict[str, object]:
    """Compare the traces that came out with the expected ones; return the problems, documents named by their ids."""
    wanted: Mapping[str, bytes] = {json.loads(each)["id"]: each for each in expected}
    assert len(wanted) == len(expected)
    documents = [(json.loads(each)["id"], each) for each in workshop.documents()]
    ids = Counter(trace_id for trace_id, _ in documents)
    print(f"{len(documents)} traces", flush=True)
    problems = {
        "missing": sorted(wanted.keys() - ids.keys()),
        "twice": sorted(each for each, number in ids.items() if number > 1),
        "wrong": sorted({trace_id for trace_id, document in documents if wanted.get(trace_id) != document}),
        "letters": Counter(dict(each.headers)["kp-error-reason"].decode() for each in workshop.letters()),
    }
    return {name: value for name, value in problems.items() if value}
