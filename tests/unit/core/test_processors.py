"""The exact scan and the cache with the BLAS kernels of lesser processors: what holds here must hold there."""

import os
import subprocess
import sys

import pytest

from tests.support.surroundings import ROOT
from worker.embed.openvino_embedder import cpu_flags

KERNELS = {"Prescott": ("Katmai", "pni"), "Sandybridge": ("Sandybridge", "avx"), "Haswell": ("Haswell", "avx512f")}
"""OPENBLAS_CORETYPE, what OpenBLAS makes of it, and the flag of the processors for which these are not the kernels that
it takes anyway: without AVX, with AVX, with AVX2."""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [kind for kind, (_, flag) in KERNELS.items() if flag in cpu_flags()])
def test_scan_and_cache_keep_their_promises_with_the_kernels_of_lesser_processors(
    kind: str, seed: int, long: bool
) -> None:
    core = KERNELS[kind][0]
    env = {**os.environ, "OPENBLAS_CORETYPE": kind, "OPENBLAS_VERBOSE": "2"}
    if kind != "Haswell":
        env["NPY_DISABLE_CPU_FEATURES"] = "X86_V3 X86_V4"  # numpy's own loops: without AVX2
    log = subprocess.run(
        [sys.executable, "-c", "import numpy"], env=env, capture_output=True, text=True, check=True
    ).stderr
    assert f"Core: {core}" in log, "OpenBLAS takes no orders: the run below would prove nothing"
    tests = [f"tests/unit/core/test_{name}.py" for name in ("scan", "novelty")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--seed", str(seed), *tests]
    command += ["--long"] * long
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
