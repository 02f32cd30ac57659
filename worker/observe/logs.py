"""Logging: one event per line, text or JSON, on standard error; repeated messages are rate-limited.

An event names its record in fields (FIELDS), passed as `extra=`. Trace content is logged only at debug level.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

from worker.core.terminal import clean, clean_json

FIELDS: Final = ("topic", "partition", "offset", "trace", "reason", "path", "seconds")
"""The fields of an event: the source record's place, the trace's id, and why it is a dead letter."""

NOISY: Final = ("aiokafka", "faust", "mode", "opentelemetry")
"""Libraries that repeat messages: without the broker, aiokafka logs 10,000 lines per second."""

LIMITED: Final = (*NOISY, "aiohttp", "worker.observe.http_server")
"""Loggers whose repeated messages are all suppressed. Anyone can cause those of the HTTP port."""

WINDOW_SECONDS: Final = 30.0
BURST: Final = 5
"""Equal messages (by logger, template and reason) that are written in one window; the others are only counted."""


class RateLimit(logging.Filter):
    """Writes `BURST` log records of one template in each window, and reports how many it suppressed.

    It applies to what any record on a topic or any request to the HTTP port can cause: the LIMITED loggers, and the
    worker's messages about one source record (those with an offset); never to debug messages.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may be written."""
        own = hasattr(record, "offset") and record.levelno > logging.DEBUG
        if not own and not record.name.startswith(LIMITED):
            return True
        key = (record.name, str(record.msg)[:60], str(getattr(record, "reason", "")))
        now = self._clock()
        began, count = self._windows.get(key, (now, 0))
        if now - began >= WINDOW_SECONDS:
            if count > BURST:
                suppressed = f"{count - BURST} similar lines were suppressed in the last {now - began:.0f} s"
                record.msg = f"{record.getMessage()} [{suppressed}]"
                record.args = None
            began, count = now, 0
        self._windows[key] = (began, count + 1)
        if len(self._windows) > 1000:
            self._windows.clear()
        return count < BURST


COORDINATOR_SECONDS: Final = 30.0
"""How long a group's coordinator may be missing before that is a warning: at a first start Kafka creates its topic."""


class OrdinaryLines(logging.Filter):
    """Says in plain words, and not as an error or warning, what an ordinary start brings.

    The group's coordinator may not be there yet (aiokafka asks again), and another member makes the group rebalance.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True; change the record in place."""
        error = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if "rebalancing" in str(record.msg) and record.levelno == logging.WARNING:
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = "the group is rebalancing: a member joins or leaves", None
        elif str(record.msg).startswith("Group Coordinator Request failed") and getattr(error, "retriable", False):
            now = self._clock()
            self._began = now if self._began is None else self._began
            late = now - self._began >= COORDINATOR_SECONDS
            record.levelno = logging.WARNING if late else logging.INFO
            record.levelname = logging.getLevelName(record.levelno)
            record.msg, record.args = "the group has no coordinator yet (%s); asking again", (error,)
        return True


class TextFormatter(logging.Formatter):
    """`2026-11-21T10:00:00.123Z INFO logger: message [field=value ...]`, one line per event."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as one line, tracebacks included; control characters as Python escapes them."""
        return clean(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        """Write the line without its traceback."""
        about = " ".join(f"{name}={value}" for name, value in fields(record).items())
        return super().formatMessage(record) + (f" [{about}]" if about else "")


class JsonFormatter(logging.Formatter):
    """The same as one JSON object per line: time, level, logger, message, the fields, and the exception, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as JSON."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return clean_json(json.dumps(event, ensure_ascii=False))


class BareFormatter(logging.Formatter):
    """The message alone, as Python writes warnings without logging configured; the commands use it."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record; line breaks stay, control characters as Python escapes them."""
        return clean(super().format(record), "\n")


def fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of an event, in the order of FIELDS, without empty ones."""
    given = record.__dict__
    return {name: given[name] for name in FIELDS if given.get(name) not in (None, "")}


def configure(level: str, style: str) -> None:
    """Set up the root logger. Libraries log warnings and errors only: a log record for each message would cost more."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("worker").setLevel(level.upper())
    for name in ("aiokafka.consumer.group_coordinator", "faust.tables.recovery"):
        logging.getLogger(name).addFilter(OrdinaryLines())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
