"""`make audit`: what the package index says today about the locked releases: yanked ones, and known vulnerabilities.

Asks with uv and pip-audit, which use the index that is configured. Exit code 1 when a release was yanked or is known to
be vulnerable, and when the index has no data on vulnerabilities: silence is no answer then.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
LOCKS: Final = ("requirements-image.lock", "requirements.lock")
PIP_AUDIT: Final = "pip-audit==2.10.1"


def main() -> int:
    """Audit the locks."""
    parser = argparse.ArgumentParser(prog="audit", description=__doc__)
    parser.add_argument("--uv", default="uv", help="the program uv [%(default)s]")
    parser.add_argument("locks", nargs="*", default=LOCKS, metavar="LOCK", help="lock files of the repository")
    options = parser.parse_args()
    problems = []
    for name in options.locks:
        count = len(re.findall("^[a-z0-9].*==", (ROOT / name).read_text(), re.MULTILINE))
        yanked = yanked_releases(options.uv, ROOT / name)
        print(f"{name}: {count} releases, all with hashes that the index has; yanked: {', '.join(yanked) or 'none'}")
        problems += [f"{name}: {it} was yanked" for it in yanked]
    first = next(line.split()[0] for line in (ROOT / options.locks[0]).read_text().splitlines() if "==" in line)
    if unknown(vulnerabilities(options.uv, f"{first}\n", "--no-deps")):
        problems.append(
            f"the package index has no data on vulnerabilities (asked for {first}): run this where the index offers "
            f"them, as PyPI does"
        )
    else:
        for name in options.locks:
            problems += audit(options.uv, name)
    print("\n".join(problems) or "no release is yanked or known to be vulnerable")
    return 1 if problems else 0


def yanked_releases(uv: str, lock: Path) -> list[str]:
    """Resolve a lock against the index, with its hashes; return uv's words for yanked releases."""
    with tempfile.TemporaryDirectory() as target:
        command = [uv, "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--target", target]
        done = _run(*command, "--requirements", str(lock))
    if done.returncode != 0:
        sys.exit(f"{lock.name} cannot be installed from this index: {done.stderr}")
    return re.findall(r"warning: `(.+?)` is yanked", done.stderr)


def vulnerabilities(uv: str, requirements: str, *options: str) -> list[dict[str, Any]]:
    """Return pip-audit's answer on each release of a requirements file's text."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "requirements.txt")
        file.write_text(requirements)
        command = [uv, "tool", "run", "--quiet", PIP_AUDIT, "--format", "json", "--disable-pip", *options]
        done = _run(*command, "--requirement", str(file))
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        sys.exit(f"pip-audit failed: {done.stderr}")
    return found


def unknown(found: list[dict[str, Any]]) -> list[str]:
    """Return the releases on which the index had nothing to say; pip-audit itself takes that for good news."""
    return [it["name"] for it in found if "skip_reason" in it]


def audit(uv: str, name: str) -> list[str]:
    """Return what is known against the releases of a lock."""
    found = vulnerabilities(uv, (ROOT / name).read_text(), "--require-hashes")
    known = [f"{name}: {it['name']} {it['version']}: {v['id']}" for it in found for v in it.get("vulns", ())]
    return known + [f"{name}: nothing is known about {it}" for it in unknown(found)]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the caller's own uv


if __name__ == "__main__":
    sys.exit(main())
