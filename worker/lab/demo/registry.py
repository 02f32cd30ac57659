"""The demo's way to a registry: `contribute` and the registry's stand-in as child processes, and what they did."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from worker.commands.shared.samples import Sample
from worker.core.terminal import clean
from worker.core.trace import CONTEXT
from worker.lab.broker.ports import free_ports
from worker.lab.demo.console import step
from worker.lab.demo.process import DemoError, DemoProcess
from worker.lab.demo.view import Document, short

STALL_SECONDS: Final = 60.0
TIER: Final = "enterprise"  # the lowest tier would take two seconds for each trace

REDACTED_ID: Final = "kp:trace:5ec2e751-0000-5000-8000-000000000001"
_REDACTED_STEP: Final = 2


def secret_sample() -> Sample:
    """Return a trace that is accepted, and holds what must not leave: all of it invented."""
    agent = "kp:agent:forge-03"
    steps: list[dict[str, Any]] = [
        {"type": "thought", "content": "Uploads fail since the key was rotated, reads go on."},
        {"type": "tool_call", "tool": {"name": "read_config"}, "content": "Which key does the uploader use?"},
        {
            "type": "observation",
            "content": "password=hunter2-winter and owner jane.doe@example.com, both from last year",
        },
        {"type": "error_recovery", "content": "Asked the wrong vault first; switched to the one of production."},
        {"type": "tool_call", "tool": {"name": "vault"}, "input": {"path": "uploader", "token": "s.4kT9vQ"}},
        {"type": "tool_call", "tool": {"name": "deploy"}, "content": "Restart the uploader with the new key"},
        {"type": "observation", "content": "Uploads succeed again from 10.20.30.40."},
    ]
    metadata = {
        "created_at": "2025-10-07T10:20:00.000Z", "agent_id": agent, "task_domain": "code", "success": True,
        "quality_score": 0, "visibility": "network", "privacy_level": "aggregated",
    }  # fmt: skip
    document = {
        "@context": CONTEXT,
        "@type": "ReasoningTrace",
        "id": REDACTED_ID,
        "metadata": metadata,
        "task": {"objective": "Find out why photo uploads are rejected after the credentials were rotated"},
        "steps": [{"step_id": number, **content} for number, content in enumerate(steps)],
        "outcome": {
            "result_summary": "The uploader had kept the old credentials; it reads them at start",
            "confidence": 0.95,
        },
    }
    return Sample(agent.encode(), json.dumps(document).encode())


@dataclass
class Contributed:
    """What `contribute` did, by its metrics, and the units that the registry holds."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    units: list[Document] = field(default_factory=list)

    @property
    def done(self) -> int:
        """How many accepted traces have been dealt with."""
        return sum(self.counts.values())


class DemoRegistry:
    """The stand-in, and the `contribute` that posts to it."""

    def __init__(self, stand_in: DemoProcess, contribute: DemoProcess, key: str) -> None:
        self.stand_in = stand_in
        self.contribute = contribute
        self.url = f"http://127.0.0.1:{stand_in.port}"
        self.key = key

    def check(self) -> None:
        """Raise DemoError if one of them has ended."""
        self.stand_in.check()
        self.contribute.check()

    def wait(self, accepted: int) -> Contributed:
        """Return what was done with all accepted traces. Raises DemoError if that takes too long."""
        seen, progress = Contributed(), time.monotonic()
        while seen.done < accepted:
            self.check()
            if time.monotonic() - progress > STALL_SECONDS:
                raise DemoError(
                    f"{seen.done} of {accepted} accepted traces were contributed.\n{self.contribute.tail()}"
                )
            time.sleep(0.1)
            now = contributed(self.contribute)
            if now.done > seen.done:
                seen, progress = now, time.monotonic()
        seen.units = [json.loads(line) for line in self.stand_in.get("/_stand-in/units")[1].splitlines()]
        if len(seen.units) != seen.counts["posted"]:
            raise DemoError(f"{seen.counts['posted']} traces were posted, but the registry has {len(seen.units)}")
        return seen

    def stop(self) -> None:
        """Stop both in order."""
        self.contribute.stop()
        self.stand_in.stop()


@contextlib.contextmanager
def running_registry(console: Console, bootstrap: str, directory: Path) -> Iterator[DemoRegistry]:
    """Start both, with a line for each; stop them at the end. The worker must be ready: it has created its topics."""
    key = f"kp_{secrets.token_hex(32)}"
    port, own_port = free_ports(2)
    arguments = ["registry", "--port", str(port), "--key", key, "--tier", TIER]
    with DemoProcess("the registry's stand-in", arguments, {}, port, directory) as stand_in:
        with step(console, "network") as say:
            stand_in.wait_ready(say, "/_stand-in/state")
            say(f"registry's stand-in at http://127.0.0.1:{port}")
        variables = {
            "KP_BOOTSTRAP_SERVERS": bootstrap, "KP_CREATE_TOPICS": "true", "KP_HTTP_HOST": "127.0.0.1",
            "KP_HTTP_PORT": str(own_port), "KP_REGISTRY_URL": f"http://127.0.0.1:{port}", "KP_REGISTRY_KEY": key,
        }  # fmt: skip
        with DemoProcess("contribute", ["contribute"], variables, own_port, directory) as contribute:
            with step(console, "network") as say:
                contribute.wait_ready(say)
                say(f"contribute ready, metrics at http://127.0.0.1:{own_port}/metrics")
            yield DemoRegistry(stand_in, contribute, key)


def contributed(contribute: DemoProcess) -> Contributed:
    """Return the counts of its metrics."""
    result = Contributed()
    for name, labels, value in contribute.metrics():
        if name in ("kp_contribute_posted_total", "kp_contribute_found_total", "kp_contribute_refused_total"):
            result.counts[name.split("_")[2]] += int(value)
        elif name == "kp_contribute_skipped_total":
            result.counts["skipped"] += int(value)
            result.skipped[labels["reason"]] += int(value)
        elif name == "kp_contribute_redactions_total":
            result.redacted[labels["type"]] += int(value)
    return result


def _named(counts: Mapping[str, int]) -> str:
    named = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f" ({named})" if named else ""


def registry_text(seen: Contributed, accepted: list[Document]) -> Text:
    """Return what reached the registry, and one trace before and after its redaction."""
    counts = seen.counts
    text = Text()
    text.append(f"  posted {counts['posted']}   ", "green")
    text.append(f"already there {counts['found']}   skipped {counts['skipped']}{_named(seen.skipped)}   ")
    text.append(f"refused {counts['refused']}\n", "red" if counts["refused"] else "")
    text.append(f"  redacted {seen.redacted.total()}{_named(seen.redacted)}")
    before = next((document for document in accepted if document["id"] == REDACTED_ID), None)
    after = next((unit for unit in seen.units if unit["id"] == REDACTED_ID), None)
    if before is not None and after is not None:
        text.append(f"; {short(REDACTED_ID)} has secrets on purpose:\n")
        for where, document in (("accepted topic", before), ("registry", after)):
            text.append(f"    {where:<15} {clean(document['steps'][_REDACTED_STEP]['content'])}\n")
        text.right_crop(1)
    return text
