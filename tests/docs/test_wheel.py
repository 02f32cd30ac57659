"""What pyproject.toml ships: sdist and wheel hold every module and data file, and work where they are installed.

model/test_installed_wheel.py installs the wheel with its requirements.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.distribution import Distribution, build_distribution
from tests.support.surroundings import ROOT

pytestmark = pytest.mark.slow

IMPORT_ALL = """
import importlib, pkgutil, worker
for module in pkgutil.walk_packages(worker.__path__, "worker."):
    if module.name != "worker.__main__":
        importlib.import_module(module.name)
from worker.lab.broker.kafka_jars import LOCK_FILE
from worker.commands.shared.options import SAMPLES
from worker.observe.status import PAGE
assert LOCK_FILE.is_file() and SAMPLES.is_file() and PAGE.is_file()
print(worker.__file__)
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    return build_distribution(tmp_path_factory.mktemp("distribution"))


def test_make_dist_builds_in_the_same_way() -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").split("\ndist:")[1].split("\n\n")[0]
    assert "uv build" in recipe
    assert "--no-build-isolation" in recipe


def test_the_sdist_and_the_wheel_hold_every_file_of_the_package(
    distribution: Distribution,
) -> None:
    """`uv build` has built the wheel from it."""
    with tarfile.open(distribution.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    files = [path for path in (ROOT / "worker").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(distribution.wheel) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == {str(path.relative_to(ROOT)) for path in files}
    assert shipped <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "deploy", "build"))]


def test_neither_holds_a_path_of_this_machine(distribution: Distribution) -> None:
    with tarfile.open(distribution.sdist) as sdist, zipfile.ZipFile(distribution.wheel) as shipped:
        files = [file for member in sdist.getmembers() if (file := sdist.extractfile(member)) is not None]
        contents = [*(file.read() for file in files), *map(shipped.read, shipped.namelist())]
    for path in (ROOT, distribution.sdist.parents[1], Path(sys.prefix)):
        assert not [content for content in contents if str(path).encode() in content]


def test_every_module_and_data_file_is_found_where_the_wheel_is_installed(
    distribution: Distribution, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(distribution.wheel).extractall(site)
    script = f"import sys; sys.path.insert(0, {str(site)!r})\n{IMPORT_ALL}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str(site / "worker/__init__.py"), done.stderr
