"""The real model on lesser processors, as oneDNN's own limit imitates them: what is equal there, and what is close."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import WORKER
from tests.support.surroundings import ROOT
from worker.embed.openvino_embedder import cpu_flags

EMBED = """
import sys
import numpy as np
from tests.support.output_embedding import decode, score_file
from tests.support.stage import LINES
from worker import embedding_text, parse_trace
from worker.config import load
from worker.embed.load import load_embedder

embedder = load_embedder(load(embedder="openvino", embed_threads=1))
vectors = [embedder.embed(embedding_text(parse_trace(line))).vector for line in LINES[:12]]
documents = score_file(LINES[:12], embedder, output_embedding=True)
assert [decode(it).tobytes() for it in documents] == [it.tobytes() for it in vectors], "not the embedder's bits"
np.savez(sys.argv[1], vectors=vectors, scores=[it["scoring"]["score"] for it in documents])
"""


def run_limited(isa: str | None, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python with oneDNN limited to an instruction set (None: without a limit)."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")} | settings
    if isa is not None:
        env["ONEDNN_MAX_CPU_ISA"] = isa
    return subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif("avx2" not in cpu_flags(), reason="this processor has no AVX2")
def test_documents_have_the_embedder_s_bits_everywhere_and_processors_agree_to_1e_6(tmp_path: Path) -> None:
    found = {}
    for isa in ("AVX", "AVX2", None):
        file = tmp_path / f"{isa}.npz"
        done = run_limited(isa, "-c", EMBED, str(file))
        assert done.returncode == 0, f"{isa}: {done.stderr}"
        found[isa] = np.load(file)
    assert found["AVX"]["vectors"].tobytes() != found["AVX2"]["vectors"].tobytes(), "the limit has no effect"
    for isa in ("AVX", "AVX2"):
        for name in ("vectors", "scores"):
            np.testing.assert_allclose(found[isa][name], found[None][name], rtol=0, atol=1e-6)


@pytest.mark.skipif("avx" not in cpu_flags(), reason="this processor has no AVX, which is what the limit imitates")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_processor_on_which_the_model_does_not_work_is_named(threads: str) -> None:
    """Without AVX, OpenVINO 2026 returns arbitrary numbers with one thread, and an error with two."""
    score = [*WORKER[1:], "score", str(ROOT / "tests/data/traces.jsonl"), "--embedder", "openvino"]
    done = run_limited("SSE41", *score, KP_EMBED_THREADS=threads)
    assert done.returncode != 0, done.stdout[:1000]
    assert "does not work on this processor" in done.stderr
    assert "KP_EMBEDDER=sentence-transformers" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
