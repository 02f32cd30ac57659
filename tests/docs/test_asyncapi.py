"""schemas/asyncapi.yaml: topics, headers and examples are the code's. AsyncAPI's own parser runs in deploy-check."""

import base64
import copy
import json
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.support.builders import TOPIC_ID, make_record, trace_bytes
from tests.support.schemas import REGISTRY
from tests.support.surroundings import SCHEMAS
from worker.assemble import open_runs
from worker.assemble.topics import SPANS_CONFIG
from worker.commands.shared.marks import followed_topic, marks_topic
from worker.config import load
from worker.contribute.unit import Refusal, Unit, receipt, refused_record
from worker.core import changelog
from worker.core.dead_letters import (
    DROPPED_HEADER,
    SOURCE_KEY_HEADER,
    TRUNCATED_HEADER,
    dead_letter,
    fit_dead_letter,
    last_resort,
    readdressed,
)
from worker.core.documents import scored_record
from worker.core.records import Fault
from worker.core.scorer import PartitionScorer
from worker.core.trace import InvalidTrace, Reason, parse_trace
from worker.core.track_record import AgentRecord, TrackRecord, encode_row
from worker.core.verdicts import Ruling, Verdict, judged_record, make_verdict, sign_verdict
from worker.kafka.topics import CHANGELOG_CONFIG
from worker.observe.metrics import REFUSAL_REASONS
from worker.redact.screen import screen_json
from worker.version import __version__

DOCUMENT: Final[dict[str, Any]] = yaml.load((SCHEMAS / "asyncapi.yaml").read_text("utf-8"), yaml.CSafeLoader)
MESSAGES = DOCUMENT["components"]["messages"]


def resolved(value: Any, base: Any = DOCUMENT) -> Any:
    """Return the value with every reference replaced by what it points to, as AsyncAPI's tools do."""
    if isinstance(value, list):
        return [resolved(item, base) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" not in value:
        return {name: resolved(item, base) for name, item in value.items()}
    if value["$ref"].startswith("urn:"):
        return value
    file, _, pointer = value["$ref"].partition("#")
    base = json.loads((SCHEMAS / file).read_text("utf-8")) if file else base
    target = base
    for name in pointer.split("/")[1:]:
        target = target[name]
    return resolved(copy.deepcopy(target), base)


def validator(name: str, part: str) -> Draft202012Validator:
    schema = resolved(MESSAGES[name].get(part, {}))
    # AsyncAPI's schemas are those of draft 7, where a list of items is what 2020-12 calls prefixItems.
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
    return Draft202012Validator(schema, registry=REGISTRY)


def checked(name: str, record: Any) -> tuple[set[str], dict[str, Any]]:
    """Validate a record of the code as this message; return the names of its headers, and their schema."""
    if "$ref" in MESSAGES[name]["payload"]:  # others are any bytes
        validator(name, "payload").validate(json.loads(record.value))
    headers = {header: value.decode() for header, value in record.headers}
    validator(name, "headers").validate(headers)
    return set(headers), resolved(MESSAGES[name].get("headers", {}))


def test_its_topics_are_the_default_settings_and_its_version_the_worker_s() -> None:
    settings = load(verdict_key_file="judges.key")
    topics = [*settings.topics.values(), settings.contributed, settings.refused, marks_topic(settings)]
    topics.append(followed_topic(settings))
    topics += [*settings.span_topics, settings.assemble_spans, settings.assemble_state]
    assert [channel["address"] for channel in DOCUMENT["channels"].values()] == topics
    assert DOCUMENT["info"]["version"] == __version__
    for channel, config in (
        ("changelog", CHANGELOG_CONFIG), ("spansByTrace", SPANS_CONFIG), ("openRuns", CHANGELOG_CONFIG)
    ):  # fmt: skip
        named = DOCUMENT["channels"][channel]["bindings"]["kafka"]["topicConfiguration"]
        flat = {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in named.items()}
        assert flat.items() <= config.items(), channel


def test_every_reference_is_there() -> None:
    assert resolved(DOCUMENT)


@pytest.mark.parametrize("name", MESSAGES)
def test_examples_satisfy_their_schemas(name: str) -> None:
    assert MESSAGES[name]["examples"]
    for example in resolved(MESSAGES[name]["examples"]):
        validator(name, "payload").validate(example["payload"])
        validator(name, "headers").validate(example.get("headers", {}))


def test_scored_records_of_the_code_satisfy_the_schemas_and_name_the_same_headers() -> None:
    scorer = PartitionScorer(dimensions=2)
    for number, raw in enumerate((trace_bytes(), trace_bytes(steps=["thought"]), trace_bytes(confidence=1.0))):
        scored = scorer.score(parse_trace(raw), [1.0, 0.0], 0)
        record = scored_record(make_record(raw, number), scored, None)
        headers, schema = checked(record.kind, record)
        assert headers == set(schema["required"])
        hidden = raw.replace(b"kp:trace:1", "kp:trace:1\U000e0041\u202e".encode())
        marked = scored_record(make_record(hidden, number), scored, None, screen=screen_json)
        assert checked(marked.kind, marked)[0] == set(schema["properties"])


@pytest.mark.parametrize(
    ("score", "valid"),
    [
        *((msgspec.json.encode(score).decode(), True) for score in (0.0, 1.0, 0.1, 1e-7, 5.5e-17, 0.7804000000000001)),
        *((score, False) for score in ("1.1", "-0.1", "nan", ".5", "")),
    ],
)
def test_the_pattern_of_the_score_takes_what_the_encoder_writes(score: str, valid: bool) -> None:
    assert validator("accepted", "headers").is_valid({"kp-score": score, "kp-decision": "accepted"}) == valid


def test_dead_letters_of_the_code_name_the_same_headers() -> None:
    record = make_record(b'{"id":' + b"x" * 5000)._replace(fault=Fault(Reason.UNREADABLE, "broken", 0))
    with pytest.raises(InvalidTrace) as caught:
        parse_trace(record.value)
    letter = dead_letter(record, caught.value)
    headers, schema = checked("deadLetter", letter)
    required = set(schema["required"])
    assert required <= headers
    for cut, names in (
        (fit_dead_letter(letter, 3000), {TRUNCATED_HEADER}),
        (last_resort(letter, 3000, b"traces/0/0"), {TRUNCATED_HEADER, DROPPED_HEADER}),
        (readdressed(letter), {SOURCE_KEY_HEADER}),
    ):
        assert names <= set(schema["properties"])
        assert checked("deadLetter", cut)[0] - (headers - required) == required | names
    assert set(schema["properties"]["kp-error-reason"]["enum"]) == set(map(str, Reason))


def test_what_contribute_writes_is_the_code_s() -> None:
    record = make_record(trace_bytes(), 7)
    written = receipt(record, Unit("kp:trace:1", b"{}", {}, {}), 201, "Tue, 14 Apr 2026 08:00:03 GMT")
    assert written.kind == "contributed"
    checked("contributed", written)
    headers, schema = checked("refused", refused_record(record, Refusal("conflict", "other content", status=200)))
    assert set(schema["required"]) <= headers
    assert schema["properties"]["kp-error-reason"]["enum"] == list(REFUSAL_REASONS)


def test_verdict_and_what_it_says_are_the_code_s() -> None:
    line = {
        "trace_id": "t", "agent_id": "ada", "task_domain": "code", "partition": 0, "offset": 6, "success": 1,
        "judge": "ci",
    }  # fmt: skip
    verdict = make_verdict(line, topic="traces", topic_id=TOPIC_ID, issued_at=datetime.now(UTC))
    signed = sign_verdict(verdict, b"k" * 32)
    headers, schema = checked("verdict", signed)
    assert headers == set(schema["required"])
    written = judged_record(make_record(signed.value, 7), Ruling(verdict, counts=True, used=0.5))
    checked("judged", written)


VERDICT = Verdict(
    version=1, trace_id="t", agent_id="ada", task_domain="code", success=1, judge="ci", issued_at=datetime.now(UTC),
    topic="traces", topic_id=TOPIC_ID, partition=0, offset=6,
)  # fmt: skip
MARK = open_runs.Mark("otlp_spans", 0, 5)
PACKED = open_runs.packed(bytes(8))
ROWS: dict[str, tuple[type[msgspec.Struct], bytes | None]] = {
    "cacheEntry": (changelog.Entry, changelog.encode(
        sequence=0, source_offset=0, stream_time_ms=0, trace_id="kp:trace:1", model="m",
        vector=np.array([1, 0], "<f4"), epoch=1, text_hash=changelog.text_hash("text"))),
    "trackRecord": (AgentRecord, encode_row(TrackRecord(TOPIC_ID).add(VERDICT, 0, 7).changes[0])[1]),
    "passes": (changelog.Marker, changelog.encode_marker(changelog.Marker(
        changelog.MARKER_VERSION, "PYVotLT1SNm5KiIC15QXiA",
        (changelog.Segment(1, 0, 0), changelog.Segment(2, 1800, 2104))))),
    **{name: (type(row), open_runs.encode(row)) for name, row in {
        "part": open_runs.Part(5, "otlp_spans", 0, 7, 8, PACKED), "openPart": open_runs.Held(5, 8, PACKED),
        "mark": MARK, "closedRun": open_runs.Remembered(5), "times": open_runs.Times(5, [MARK])}.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_code_have_the_fields_of_the_schemas_and_examples_are_rows(name: str) -> None:
    kind, raw = ROWS[name]
    fields = [*["tag"] * (kind.__struct_config__.tag is not None), *kind.__struct_fields__]
    items = resolved(MESSAGES[name]["payload"])["items"]
    assert [item["title"] for item in items] == fields
    row = msgspec.msgpack.decode(raw or b"")
    validator(name, "payload").validate([base64.b64encode(it).decode() if isinstance(it, bytes) else it for it in row])
    assert name != "cacheEntry" or items[0]["const"] == changelog.VERSION
    example = [base64.b64decode(it) if isinstance(ours, bytes) else it
               for it, ours in zip(MESSAGES[name]["examples"][0]["payload"], row, strict=True)]  # fmt: skip
    assert name != "passes" or example == row
    assert isinstance(msgspec.msgpack.decode(msgspec.msgpack.encode(example), type=kind), kind)
    if "content" in fields:
        assert len(open_runs.unpacked(example[-1])) == example[-2]
