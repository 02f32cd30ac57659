"""Logging: what is repeated is held back and counted, and an event is one line."""

import inspect
import json
import logging
import sys
import unicodedata

import pytest
from aiokafka.consumer import group_coordinator
from aiokafka.errors import GroupAuthorizationFailedError, GroupCoordinatorNotAvailableError
from faust.tables import recovery

from tests.support.clock import HandClock
from worker.observe.logs import (
    BURST,
    COORDINATOR_SECONDS,
    NOISY,
    WINDOW_SECONDS,
    JsonFormatter,
    OrdinaryLines,
    RateLimit,
    TextFormatter,
    configure,
)


def event(message: str, *args: object, name: str = "aiokafka.conn", level: int = logging.WARNING) -> logging.LogRecord:
    record = logging.LogRecord(name, level, __file__, 1, message, args, None)
    record.created, record.msecs = 1_776_153_600.589, 589.0
    return record


def test_a_burst_passes_and_the_rest_is_counted_and_told_when_the_window_closes() -> None:
    clock = HandClock(100.0)
    limit = RateLimit(clock)
    passed = [limit.filter(event("node %s is away", n)) for n in range(1000)]
    assert passed == [True] * BURST + [False] * (1000 - BURST)

    clock.now += WINDOW_SECONDS - 0.001
    assert not limit.filter(event("node %s is away", 7))
    clock.now += 0.001
    last = event("node %s is away", 8)
    assert limit.filter(last)
    held = 1001 - BURST
    assert (
        last.getMessage() == f"node 8 is away [{held} similar lines were suppressed in the last {WINDOW_SECONDS:.0f} s]"
    )
    following = [event("node %s is away", n) for n in range(BURST)]
    assert [limit.filter(record) for record in following] == [True] * (BURST - 1) + [False]
    assert following[0].getMessage() == "node 0 is away"
    for count in range(BURST + 1):  # a window without more than a burst is not told
        quiet = event("back")
        clock.now += WINDOW_SECONDS if count == BURST else 0
        assert limit.filter(quiet)
    assert quiet.getMessage() == "back"


def test_messages_are_told_apart_by_logger_and_template() -> None:
    limit = RateLimit(HandClock(100.0))
    for _ in range(BURST):
        limit.filter(event("away"))
    assert not limit.filter(event("away"))
    assert limit.filter(event("back"))
    assert limit.filter(event("away", name="aiokafka.cluster"))


def own(reason: str = "", offset: int | None = None, level: int = logging.INFO) -> logging.LogRecord:
    record = event("dead letter" if reason else "started", name="worker.stream.partition_task", level=level)
    if offset is not None:
        record.offset, record.reason = offset, reason
    return record


def test_the_worker_s_own_messages_are_held_back_only_where_each_record_can_cause_one() -> None:
    limit = RateLimit(HandClock(100.0))
    assert all(limit.filter(own()) for _ in range(1000))
    assert sum(limit.filter(own("not_json", n)) for n in range(1000)) == BURST
    assert sum(limit.filter(own("invalid_value", n)) for n in range(1000)) == BURST  # a rare reason is not hidden
    assert all(limit.filter(own("not_json", n, logging.DEBUG)) for n in range(1000))


def test_many_templates_do_not_fill_the_memory() -> None:
    limit = RateLimit(HandClock(100.0))
    for number in range(5000):
        limit.filter(event(f"message {number}"))
    assert len(limit._windows) <= 1001


MESSAGES = [
    "Größe 检查",
    "two\nlines",
    "a\r\nb",
    'quote " and \\',
    "\x1b[31m\0\x7f",
    "\x85\u2028\u2029\x0b\x0c\x1c",
    "\ud800",
]


@pytest.mark.parametrize("message", MESSAGES, ids=ascii)
def test_an_event_is_one_line_in_both_formats(message: str) -> None:
    record = event("%s", message, name="worker.stream.worker", level=logging.ERROR)
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line]
    expected = {
        "time": "2026-04-14T08:00:00.589Z", "level": "error", "logger": "worker.stream.worker", "message": message
    }  # fmt: skip
    assert json.loads(line) == expected
    try:
        raise ValueError(message)
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line]
    assert "ValueError: " in json.loads(line)["exception"]
    line = TextFormatter().format(record)
    assert line.splitlines() == [line]
    assert not [character for character in line if unicodedata.category(character) == "Cc"]
    assert line.startswith("2026-04-14T08:00:00.589Z ERROR worker.stream.worker: ")


def test_both_formats_carry_what_an_event_is_about() -> None:
    record = event("dead letter", name="worker.stream.partition_task", level=logging.INFO)
    about = {"topic": "traces", "partition": 0, "offset": 42, "trace": "kp:trace:\n1", "reason": "not_json", "path": ""}
    record.__dict__.update(about, other="not a field of ours")
    line = TextFormatter().format(record)
    assert line.endswith("dead letter [topic=traces partition=0 offset=42 trace=kp:trace:\\n1 reason=not_json]")
    written = json.loads(JsonFormatter().format(record))
    assert {name: written[name] for name in written.keys() & about.keys()} == {
        k: v for k, v in about.items() if v != ""
    }
    assert "other" not in written


@pytest.mark.parametrize(("style", "formatter"), [("text", TextFormatter), ("json", JsonFormatter)])
def test_configure(style: str, formatter: type[logging.Formatter], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("worker", *NOISY)}
    monkeypatch.setattr(root, "handlers", [*root.handlers])
    monkeypatch.setattr(root, "level", root.level)
    try:
        configure("debug", style)
        (handler,) = root.handlers
        assert isinstance(handler.formatter, formatter)
        assert any(isinstance(part, RateLimit) for part in handler.filters)
        assert logging.getLogger("worker.stream.partition_task").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("aiokafka.conn").isEnabledFor(logging.INFO)
        assert not logging.getLogger("anything").isEnabledFor(logging.INFO)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def test_a_coordinator_that_is_not_there_yet_is_no_error_until_it_takes_long() -> None:
    now = 0.0
    missing = OrdinaryLines(lambda: now)
    passed = []
    gone, denied = GroupCoordinatorNotAvailableError(), GroupAuthorizationFailedError()
    for error in (gone, gone, denied):
        words = "Group Coordinator Request failed: %s"
        record = logging.LogRecord(group_coordinator.__name__, logging.ERROR, "", 0, words, (error,), None)
        assert missing.filter(record)
        passed.append((record.levelname, record.getMessage()))
        now += COORDINATOR_SECONDS
    words = "the group has no coordinator yet ([Error 15] GroupCoordinatorNotAvailableError); asking again"
    assert passed[:2] == [("INFO", words), ("WARNING", words)]
    assert passed[2][0] == "ERROR"


def test_a_member_that_joins_is_no_warning() -> None:
    lines = [
        (group_coordinator.__name__, "Heartbeat failed for group %s because it is rebalancing", ("kp-worker",)),
        ("faust.tables.recovery", "[^---Recovery]: Recovery rebalancing again", ()),
        (group_coordinator.__name__, "Heartbeat failed for group %s: generation id is not  current.", ("kp-worker",)),
    ]
    levels = []
    for name, words, args in lines:
        record = logging.LogRecord(name, logging.WARNING, "", 0, words, args, None)
        assert OrdinaryLines().filter(record)
        levels.append(record.levelname)
        if record.levelno == logging.INFO:
            assert record.getMessage() == "the group is rebalancing: a member joins or leaves"
    assert levels == ["INFO", "INFO", "WARNING"]


def test_the_words_of_the_libraries_are_those_that_the_filter_knows() -> None:
    source = inspect.getsource(group_coordinator)
    assert '"Group Coordinator Request failed: %s"' in source
    assert '"Heartbeat failed for group %s because it is rebalancing"' in source
    assert 'self.log.warning("Recovery rebalancing again")' in inspect.getsource(recovery)
