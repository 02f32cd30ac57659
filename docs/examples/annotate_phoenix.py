"""Writes the scores and verdicts of assembled runs to Arize Phoenix (docs/reading-the-accepted-topic.md)."""

import asyncio
import json
import math
import os
import re
import signal
import urllib.error
import urllib.request

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError

RUN = re.compile(r"kp:trace:([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})(?::([0-9a-f]{16}))?")


JUDGED_TOPIC = os.environ.get("KP_JUDGED_TOPIC")


def annotation(record):
    """Return the kind of what a scored trace or a verdict is about, and its annotation; None if there is nothing to say."""
    document = json.loads(record.value)
    if record.topic == JUDGED_TOPIC:
        verdict = document["verdict"]
        run, name, author, score = document["trace_id"], "outcome", verdict["judge"], verdict["success"]
        label = "failure" if score < 0.5 else "success"
        if not document["counts"]:
            return None
    else:
        scoring = document["scoring"]
        run, name, author, score = document["id"], "knowledge value", "kp-worker", scoring["score"]
        label = scoring["decision"]
    if not math.isfinite(score):
        raise TypeError("no score")
    by_assemble = RUN.fullmatch(run)
    if by_assemble is None:
        return None
    trace, span = by_assemble.groups()
    kind, target = ("span", span) if span else ("trace", trace.replace("-", ""))
    return kind, {
        f"{kind}_id": target,
        "name": name,
        "identifier": author,
        "annotator_kind": "CODE",
        "result": {"score": score, "label": label},
    }


def post(kind, annotations):
    """Write annotations of one kind; return whether Phoenix knows what all of them are about."""
    request = urllib.request.Request(
        f"{os.environ['PHOENIX_ENDPOINT']}/v1/{kind}_annotations?sync=true",
        json.dumps({"data": annotations}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('PHOENIX_API_KEY', '')}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60):
            return True
    except urllib.error.HTTPError as error:
        if error.code != 404:  # Phoenix is away, or refuses the key: no fault of the records
            raise
        return False


def write(read):
    for kind in ("trace", "span"):
        annotations = [each for of, each in read if of == kind]
        if annotations and not post(kind, annotations):  # then none of them is written
            for each in annotations:
                if not post(kind, [each]):
                    print(f"Phoenix does not know the {kind} {each[f'{kind}_id']}")


def read(records):
    last = {}  # the last version of each annotation
    for record in records:
        try:
            if each := annotation(record):
                kind, values = each
                last[kind, values[f"{kind}_id"], values["name"], values["identifier"]] = each
        except Exception as error:
            print(f"{record.topic}/{record.partition}/{record.offset} cannot be read: {error!r}")
    return list(last.values())


async def main():
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    consumer = AIOKafkaConsumer(
        os.environ.get("KP_ACCEPTED_TOPIC", "traces.accepted"),
        os.environ.get("KP_REJECTED_TOPIC", "traces.rejected"),
        *filter(None, [JUDGED_TOPIC]),
        bootstrap_servers=os.environ["KP_BOOTSTRAP_SERVERS"],
        group_id="annotate",
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer:
        print("reading", *consumer.subscription())
        while not stopped.is_set():
            batches = await consumer.getmany(timeout_ms=500, max_records=500)
            await asyncio.to_thread(write, read([each for batch in batches.values() for each in batch]))
            try:
                await consumer.commit()
            except CommitFailedError:
                print("the partitions have moved: their new reader writes these annotations again")


asyncio.run(main())
