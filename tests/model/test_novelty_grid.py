"""KP_EMBED_TEXT with the real model, on a small labelled set that is made here."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.runs.novelty_grid import Row, Vectors, choices, measured, read_labelled
from tests.support.builders import trace_document
from tests.support.output_embedding import decode
from worker import parse_trace
from worker.cli import cli
from worker.config import load
from worker.core.novelty import unit_mean
from worker.core.trace import embedded_texts
from worker.embed.load import load_embedder

TASKS = (
    "Refund the second night of booking 4471, the heating was broken",
    "Find out why invoice 2210 was paid twice",
    "Rename the column amount to total in all reports of March",
    "Tell the customer when parcel 88-41 arrives in Lyon",
    "Count the rows of table visits that have no country",
    "Restart the staging database and check the replicas",
    "Translate the safety notice of the coffee machine into Spanish",
    "Compare the offers of three cleaning companies for the office",
    "Move the meeting with the auditors to next Thursday",
    "Delete the log files that are older than ninety days",
)
STYLES = (
    "I read the policy before I act. Every change needs a confirmation, and I answer politely and in full.",
    "Step by step: plan, search, read the page, write a note, check the note, then ask the user again.",
    "print(df.head()); df.info(); the frame has twelve columns; no error; the cell ran in 0.2 s.",
    "Thought: I should use the tool. Action: search. Observation: 3 results. Thought: open the first result.",
)
TRIALS = 4


def labelled_documents(seed: int) -> list[dict[str, Any]]:
    """Return each task several times, as agents' transcripts are: mostly the same words, whatever the task."""
    rng = random.Random(seed)
    documents = []
    for trial in range(TRIALS):
        for task, objective in enumerate(TASKS):
            document = trace_document(f"kp:trace:{trial}-{task}", objective=objective, steps=["thought", "observation"])
            words = f"{STYLES[trial]} {objective}".split()
            document["steps"][0]["content"] = f"{STYLES[trial]} " * 4
            document["steps"][1]["content"] = " ".join(rng.choice(words) for _ in range(150))
            documents.append(document | {"x_task": f"t{task}"})
    return documents


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labelled") / "runs.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in labelled_documents(1)))
    return path


def figures(file: Path, view: str) -> Row:
    """Return the figures at 64 tokens."""
    traces, labels = read_labelled(file, "x_task")
    [(settings, shown)] = choices([f"embed_text={view}", "max_tokens=64"], [])
    made, cut, equal = Vectors().of(traces, settings)
    return Row(file.name, shown, cut, equal, measured(made, labels, 1)[0])


def test_the_objective_apart_tells_repeats_where_the_transcripts_are_alike(file: Path) -> None:
    whole, objective = figures(file, "whole"), figures(file, "objective")
    assert whole.settings == {"embed_text": "whole", "max_tokens": 64}
    assert whole.figures.repeats == objective.figures.repeats == len(TASKS) * (TRIALS - 1)
    assert whole.figures.auc_warm is not None
    assert objective.figures.auc_warm is not None
    assert objective.figures.auc_warm.value > max(0.9, whole.figures.auc_warm.value)
    assert (whole.cut, objective.cut) == (len(TASKS) * TRIALS,) * 2


def test_score_embeds_the_objective_apart(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "scored.jsonl"
    settings = ["--set", "embed_text=objective", "--set", "output_embedding=true", "--set", "max_tokens=128"]
    done = CliRunner().invoke(cli, ["score", str(file), "-o", str(output), *settings])
    assert done.exit_code == 0, done.stderr
    embedder = load_embedder(load(embedder="auto", max_tokens=128))
    assert not re.search("objective.* truncated", done.stderr)
    for line, scored in zip(file.read_bytes().splitlines(), output.read_bytes().splitlines(), strict=True):
        document = json.loads(scored)
        identity = document["scoring"]["embedder"]
        assert (identity["embed_text"], identity["max_tokens"], identity["objective_tokens"]) == ("objective", 128, 512)
        if document["id"].startswith("kp:trace:3-"):
            objective, text = embedded_texts(parse_trace(line), "objective")
            expected = unit_mean([embedder.embed(objective, objective=True).vector, embedder.embed(text).vector])
            assert decode(document).tobytes() == expected.tobytes()
            nearest = document["scoring"]["nearest"]
            assert nearest["id"].endswith(document["id"][-2:]), "the nearest trace is the same task"


PREAMBLE = (
    "You are an assistant of the back office. Read the handbook before you act, keep to the rules of data protection, "
    "ask whenever a rule is unclear, and write down each step that you take, with its reason and with what came of it. "
    "Use the tools one at a time, never guess a number, quote the records you rely on, and answer in full sentences "
    "that the customer understands. When a tool fails, wait, try it once more, and then report the failure. The task: "
)
"""About 90 tokens; the goal comes behind them."""


def test_a_goal_at_the_end_of_a_long_objective_is_read_whatever_the_token_limit(tmp_path: Path) -> None:
    documents = labelled_documents(2)[: 2 * len(TASKS)]
    for document in documents:
        document["task"]["objective"] = PREAMBLE + document["task"]["objective"]
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    # Cut at 64 tokens, all objectives are equal, and the AUC is about .5.
    whole, objective = figures(file, "whole"), figures(file, "objective")
    assert objective.figures.auc_warm.value > 0.95
    assert (whole.equal, objective.equal) == (2 * len(TASKS) - 1, len(TASKS)), "objectives apart are read whole"


def test_an_objective_beyond_the_model_s_own_limit_is_cut_and_said(tmp_path: Path) -> None:
    document = trace_document("kp:trace:1", objective="word " * 600, steps=["thought"])
    document["steps"][0]["content"] = "done"
    (tmp_path / "in.jsonl").write_text(json.dumps(document) + "\n")
    done = CliRunner().invoke(cli, ["score", str(tmp_path / "in.jsonl"), "--set", "embed_text=objective"])
    assert "1 text truncated at 256 tokens" in done.stderr
    assert "1 objective truncated: the model does not read more" in done.stderr
