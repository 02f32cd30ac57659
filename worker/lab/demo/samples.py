"""The records of the demo: the sample traces, and invalid ones among them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from worker.commands.shared.options import SAMPLES
from worker.core.trace import CONTEXT


class Sample(NamedTuple):
    """A record to publish; the key is the agent, so that its traces stay in order and share one cache."""

    key: bytes
    value: bytes | None


def samples() -> list[Sample]:
    """Return the sample traces in the order of the story, with invalid ones among them."""
    lines = SAMPLES.read_bytes().splitlines()
    result = [Sample(msgspec.json.decode(line)["metadata"]["agent_id"].encode(), line) for line in lines]
    for number, value in enumerate(broken_values(lines[0]), 1):
        result.insert(10 * number, Sample(b"kp:agent:gremlin-%02d" % number, value))
    return result


def broken_values(trace: bytes) -> list[bytes | None]:
    """Return values that are not valid traces, each for a different reason."""
    document = msgspec.json.decode(trace)
    del document["task"]
    too_sure = msgspec.json.decode(trace)
    too_sure["outcome"]["confidence"] = 90
    return [
        trace[:300],
        trace.replace(CONTEXT.encode(), b"https://schema.org"),
        msgspec.json.encode(document),
        msgspec.json.encode(too_sure),
        None,
        b"PK\x03\x04\x14\x00\xff\xfe\x9c\x00",
        trace.decode().replace("evening", "Märzabend").encode("latin-1"),
    ]
