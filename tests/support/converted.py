"""`kp-worker convert` on runs that a test makes, and what comes out."""

import json
from typing import Any

from click.testing import CliRunner, Result

from worker.cli import cli
from worker.core.trace import parse_trace

VALUES = {
    "--success": "true", "--confidence": "0.8", "--domain": "travel", "--visibility": "private",
    "--privacy": "aggregated", "--created-at": "2026-04-14T08:00:00Z",
}  # fmt: skip
OPTIONS = [word for option in VALUES.items() for word in option]


def lines(*runs: Any) -> bytes:
    return b"".join(json.dumps(run).encode() + b"\n" for run in runs)


def convert(data: bytes, *more: str, source: str = "auto", **values: str | None) -> Result:
    """Run the command on standard input, with VALUES but for what is given here (None: without the option)."""
    named = VALUES | {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    options = [word for name, value in named.items() if value is not None for word in (name, value)]
    result = CliRunner().invoke(cli, ["convert", "--from", source, *options, *more, "-"], input=data)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def traces_of(result: Result) -> list[dict[str, Any]]:
    found = result.stdout_bytes.split(b"\n")[:-1]
    for raw in found:
        parse_trace(raw)
    return [json.loads(raw) for raw in found]
