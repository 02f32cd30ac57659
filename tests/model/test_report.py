"""`kp-worker report` of the shared traces."""

import json
from pathlib import Path

from tests.support.builders import read_jsonl
from tests.support.processes import run_command
from tests.support.reports import words
from tests.support.surroundings import DATA, environment
from worker.commands.shared.shown import percent


def test_the_shared_traces_from_file_to_page(tmp_path: Path, long: bool) -> None:
    count = 300 if long else 100
    scored, output = tmp_path / "scored.jsonl", tmp_path / "report.html"
    source = tmp_path / "traces.jsonl"
    source.write_bytes(b"".join((DATA / "traces.jsonl").read_bytes().splitlines(keepends=True)[:count]))
    for command in (["score", str(source), "-o", str(scored)], ["report", str(scored), "--page", str(output)]):
        done = run_command("worker", command, environment(), seconds=200)
        assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in scored.read_bytes().splitlines()]
    expected = [row["score"] for row in read_jsonl("traces_scores.jsonl")[:count]]
    text = words(output.read_text("utf-8"))
    accepted = sum(score >= 0.75 for score in expected)
    assert f"{percent(accepted / count)} accepted, {accepted} of {count}" in text
    nearest = min(score for score in expected if score >= 0.75)
    assert f"{nearest:.3f}" in text
    for domain in {document["metadata"]["task_domain"] for document in documents}:
        assert domain in text
