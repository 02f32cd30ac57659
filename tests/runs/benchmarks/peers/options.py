"""The command line that all peers share."""

import argparse
import signal

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


class Stop:
    """Turns true at SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked
