"""The command line that all peers share."""

import argparse
import signal
import threading
from collections.abc import Callable

from tests.runs.benchmarks.job import Job, changelog_topic, model_embed, output_topics, table_embed

Options = argparse.Namespace
"""bootstrap, group, source, outputs (topic by kind), changelog, exactly_once, vectors, commit_interval (s, or None)."""


def job(options: Options) -> Job:
    return Job({"none": lambda: None, "table": lambda: table_embed, "model": model_embed}[options.vectors]())


def parse() -> Options:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap", "--group", "--source"):
        parser.add_argument(name, required=True)
    parser.add_argument("--exactly-once", action="store_true")
    parser.add_argument("--vectors", choices=("none", "table", "model"), default="table")
    parser.add_argument("--commit-interval", type=float, help="seconds; where the peer has such a setting")
    given = parser.parse_args()
    given.outputs, given.changelog = output_topics(given.group), changelog_topic(given.group)
    return given


def stop_asked() -> Callable[[], bool]:
    """Return whether SIGTERM or SIGINT has come, from now on."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop.is_set
