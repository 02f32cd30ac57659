"""Logging: one event a line, text or JSON, on standard error; repeated messages are rate-limited."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

NOISY: Final = ("aiokafka", "faust", "mode")
"""Libraries that repeat themselves: with the broker away, aiokafka logs 10,000 lines a second."""

WINDOW_SECONDS: Final = 30.0
BURST: Final = 5
"""Equal messages (by logger and template) that pass in one window; the rest is counted and told when it closes."""


class RateLimit(logging.Filter):
    """Lets `BURST` records of one template through in each window, and says how many it held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may be written."""
        if not record.name.startswith(NOISY):
            return True
        key = (record.name, str(record.msg)[:60])
        now = self._clock()
        began, count = self._windows.get(key, (now, 0))
        if now - began >= WINDOW_SECONDS:
            if count > BURST:
                record.msg = (
                    f"{record.getMessage()} [{count - BURST} like it were held back in the last {now - began:.0f} s]"
                )
                record.args = None
            began, count = now, 0
        self._windows[key] = (began, count + 1)
        if len(self._windows) > 1000:
            self._windows.clear()
        return count < BURST


class TextFormatter(logging.Formatter):
    """`2026-11-21T10:00:00.123Z INFO logger: message`, one line an event."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as one line, tracebacks included."""
        return super().format(record).replace("\n", " | ")


class JsonFormatter(logging.Formatter):
    """The same as one JSON object a line: time, level, logger, message, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as JSON."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


def configure(level: str, style: str) -> None:
    """Set up the root logger. Libraries log from warning on: a log record built for each message costs more than it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("worker").setLevel(level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
