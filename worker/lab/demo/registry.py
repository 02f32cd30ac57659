"""The demo's registry part: `contribute` and a stand-in registry as child processes, and their results."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rich.text import Text

from worker.commands.shared.samples import Sample
from worker.core.terminal import clean
from worker.core.trace import CONTEXT
from worker.lab.broker.ports import free_ports
from worker.lab.demo.flow import STALL_SECONDS, Document
from worker.lab.demo.process import DemoError, DemoProcess, Stage

TIER: Final = "enterprise"  # the lowest tier would take two seconds per trace

REDACTED_ID: Final = "kp:trace:5ec2e751-0000-5000-8000-000000000001"
_REDACTED_STEP: Final = 2


def secret_sample() -> Sample:
    """Return a trace that is accepted and contains secrets, all invented."""
    agent = "kp:agent:forge-03"
    steps: list[dict[str, Any]] = [
        {"type": "thought", "content": "Uploads fail since the key was rotated, reads go on."},
        {"type": "tool_call", "tool": {"name": "read_config"}, "content": "Which key does the uploader use?"},
        {"type": "observation",
         "content": "password=hunter2-winter and owner jane.doe@example.com, both from last year"},
        {"type": "error_recovery", "content": "Asked the wrong vault first; switched to the one of production."},
        {"type": "tool_call", "tool": {"name": "vault"}, "input": {"path": "uploader", "token": "s.4kT9vQ"}},
        {"type": "tool_call", "tool": {"name": "deploy"}, "content": "Restart the uploader with the new key"},
        {"type": "observation", "content": "Uploads succeed again from 10.20.30.40."},
    ]  # fmt: skip
    document = {
        "@context": CONTEXT, "@type": "ReasoningTrace", "id": REDACTED_ID,
        "metadata": {
            "created_at": "2025-10-07T10:20:00.000Z", "agent_id": agent, "task_domain": "code", "success": True,
            "quality_score": 0, "visibility": "network", "privacy_level": "aggregated",
        },
        "task": {"objective": "Find out why photo uploads are rejected after the credentials were rotated"},
        "steps": [{"step_id": number, **content} for number, content in enumerate(steps)],
        "outcome": {
            "result_summary": "The uploader had kept the old credentials; it reads them at start", "confidence": 0.95,
        },
    }  # fmt: skip
    return Sample(agent.encode(), json.dumps(document).encode())


@dataclass
class Contributed:
    """The work of `contribute` according to its metrics, and the units in the registry."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    units: list[Document] = field(default_factory=list)


class DemoRegistry(NamedTuple):
    """The stand-in registry and the `contribute` that posts to it."""

    stand_in: DemoProcess
    contribute: DemoProcess
    key: str  # of the registry

    def check(self) -> None:
        """Raise DemoError if one of them has ended."""
        self.stand_in.check()
        self.contribute.check()

    def wait(self, accepted: int) -> Contributed:
        """Return the result for all accepted traces. Raises DemoError if that takes too long."""
        seen, progress = Contributed(), time.monotonic()
        while seen.counts.total() < accepted:
            self.check()
            if time.monotonic() - progress > STALL_SECONDS:
                done = f"{seen.counts.total()} of {accepted} accepted traces were contributed"
                raise DemoError(f"{done}.\n{self.contribute.tail()}")
            time.sleep(0.1)
            now = contributed(self.contribute)
            if now.counts.total() > seen.counts.total():
                seen, progress = now, time.monotonic()
        seen.units = [json.loads(line) for line in self.stand_in.get("/_stand-in/units")[1].splitlines()]
        if len(seen.units) != seen.counts["posted"]:
            raise DemoError(f"{seen.counts['posted']} traces were posted, but the registry has {len(seen.units)}")
        return seen


@contextlib.contextmanager
def running_registry(stage: Stage) -> Iterator[DemoRegistry]:
    """Start both; kill them at the end. The worker must be ready, because it creates the topics."""
    key = f"kp_{secrets.token_hex(32)}"
    (port,) = free_ports(1)
    arguments = ["registry", "--port", str(port), "--key", key, "--tier", TIER]
    with stage.running("network", "the registry's stand-in", arguments, {}, port=port, path="/_stand-in/state",
                       says="registry's stand-in at {url}") as stand_in:  # fmt: skip
        variables = {"REGISTRY_URL": stand_in.url, "REGISTRY_KEY": key}
        says = "contribute ready, metrics at {url}/metrics"
        with stage.running("network", "contribute", ["contribute"], variables, says=says) as contribute:
            yield DemoRegistry(stand_in, contribute, key)


def contributed(contribute: DemoProcess) -> Contributed:
    """Return the counts from its metrics."""
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
    """Return what reached the registry, and one trace before and after redaction."""
    counts = seen.counts
    text = Text()
    text.append(f"  posted {counts['posted']}   ", "green")
    text.append(f"already there {counts['found']}   skipped {counts['skipped']}{_named(seen.skipped)}   ")
    text.append(f"refused {counts['refused']}\n", "red" if counts["refused"] else "")
    text.append(f"  redacted {seen.redacted.total()}{_named(seen.redacted)}")
    before = next((document for document in accepted if document["id"] == REDACTED_ID), None)
    after = next((unit for unit in seen.units if unit["id"] == REDACTED_ID), None)
    if before is not None and after is not None:
        text.append(f"; {REDACTED_ID[9:17]} has secrets on purpose:\n")
        for where, document in (("accepted topic", before), ("registry", after)):
            text.append(f"    {where:<15} {clean(document['steps'][_REDACTED_STEP]['content'])}\n")
        text.right_crop(1)
    return text
