"""`kp-worker explain --parts` with the real model: the parts add up to the similarity that the document holds."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.support.builders import trace_document
from tests.support.commands import Desk
from tests.support.kafka_fixtures import produce
from worker import config
from worker.commands.score.lines import score_lines
from worker.embed.load import load_configured
from worker.lab.broker.embedded_kafka import EmbeddedKafka

VIEW = {"embed_text": "objective", "max_tokens": 128}


def scored_documents(view: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for number, content in enumerate(("The heater of room 12 is cold.", "The guest of room 12 has no heating at all.")):
        document = trace_document(f"kp:trace:part-{number}", objective="Refund the broken heater", steps=["thought"])
        document["steps"][0]["content"] = content
        lines.append(json.dumps(document))
    settings, output = config.load(**view), io.BytesIO()
    score_lines(io.BytesIO("\n".join(lines).encode()), output, None, settings, load_configured(settings))
    return [json.loads(line) for line in output.getvalue().splitlines()]


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    desk = Desk(kafka, KP_EMBEDDER="auto")
    for offset, document in enumerate([*scored_documents(VIEW), *_renamed(scored_documents({"max_tokens": 128}))]):
        document["scoring"]["source"]["offset"] = offset
        kind = document["scoring"]["decision"]
        produce(desk.bootstrap, desk.topics[kind], [(None, json.dumps(document).encode(), [], 0, None)])
    return desk


def _renamed(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [document | {"id": document["id"].replace("part", "whole")} for document in documents]


def test_the_parts_add_up_to_the_similarity(desk: Desk) -> None:
    options = [f"--set={name}={value}" for name, value in VIEW.items()]
    done = desk.run("explain", "kp:trace:part-1", "--parts", *options)
    assert done.returncode == 0, done.stderr
    explained = json.loads(done.stdout)
    objective, text = explained["parts"]
    assert (objective["name"], text["name"]) == ("objective", "text")
    assert objective["share"] + text["share"] == pytest.approx(explained["nearest"]["similarity"], abs=1e-5)
    assert objective["alone"] == pytest.approx(1, abs=1e-5), "the objectives are equal"
    assert 0.5 < text["alone"] < 0.999
    shown = desk.run("explain", "kp:trace:part-1", "--parts", "--text", *options).stdout
    assert f"of it {objective['share']:.4f} by the objective" in shown


def test_what_has_no_parts_or_another_embedder_says_so(desk: Desk) -> None:
    done = desk.run("explain", "kp:trace:part-1", "--parts")
    assert done.returncode == 1
    assert "the settings name all-MiniLM-L6-v2" in done.stderr
    done = desk.run("explain", "kp:trace:whole-1", "--parts")
    assert done.returncode == 1
    assert "was embedded as one text" in done.stderr
    done = desk.run("explain", "README.md", "--parts")
    assert done.returncode == 2
    assert "goes with a trace on the topics" in done.stderr
