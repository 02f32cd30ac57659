"""What pyproject.toml ships: the wheel holds every module and data file, and works where it is installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.imports import ROOT

IMPORT_ALL = """
import importlib, pkgutil, worker
for module in pkgutil.walk_packages(worker.__path__, "worker."):
    if module.name != "worker.__main__":
        importlib.import_module(module.name)
from worker.broker.kafka_jars import LOCK_FILE
from worker.commands.samples import SAMPLES
from worker.observe.status_page import PAGE
assert LOCK_FILE.is_file() and SAMPLES.is_file() and PAGE.is_file()
print(worker.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy of what git tracks: setuptools leaves its build folders in the tree."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "worker", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(built)], cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "worker"
    assert shipped == {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }  # fmt: skip


def test_every_module_and_data_file_is_found_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = f"import sys; sys.path.insert(0, {str(site)!r})\n{IMPORT_ALL}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str(site / "worker/__init__.py"), done.stderr
