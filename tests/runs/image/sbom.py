"""`make sbom`: a software bill of materials (CycloneDX 1.6) of the image, from what is installed in it.

Lists the Python packages, Debian's packages, Python itself and the model. Nothing is taken from lock files: what the
base image or a build stage brings is seen as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Final

from tests.runs.engine.docker import IMAGE, DockerEngine, build_image, docker_engine
from tests.runs.engine.errors import EngineError
from worker.version import __version__

VALIDATOR: Final = "cyclonedx-python-lib[json-validation]==11.12.0"
VALIDATE: Final = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
sys.exit(f"{sys.argv[1]} is no valid CycloneDX 1.6: {errors}" if errors else 0)
"""
LOOK: Final = """
import hashlib, importlib.metadata, json, pathlib, platform
def packages():
    for it in importlib.metadata.distributions():
        known = it.metadata
        text = known.get("License-Expression") or known.get("License") or ""
        classifiers = [c.split(" :: ")[-1] for c in known.get_all("Classifier", ()) if c.startswith("License ::")]
        license = text if text and len(text) < 80 and "\\n" not in text else ", ".join(classifiers)
        yield {"name": known["Name"], "version": it.version, "license": license}
def debian():
    for stanza in pathlib.Path("/var/lib/dpkg/status").read_text().split("\\n\\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status") == "install ok installed":
            yield {"name": fields["Package"], "version": fields["Version"], "architecture": fields["Architecture"]}
def model():
    for file in sorted(pathlib.Path("/opt/kp-worker/model").rglob("*")):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            yield {"name": str(file.relative_to("/opt/kp-worker/model")), "sha256": digest}
release = dict(line.split("=", 1) for line in open("/etc/os-release").read().splitlines() if "=" in line)
print(json.dumps({"python": platform.python_version(), "packages": list(packages()), "debian": list(debian()),
    "model": list(model()), "distro": release["ID"] + "-" + release.get("VERSION_ID", "").strip('"')}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.image.sbom", description=__doc__)
    parser.add_argument("--tag", help=f"an image that is there already [{IMAGE}, which is built]")
    parser.add_argument("--output", type=Path, default=Path("dist") / f"kp-worker-{__version__}.cdx.json")
    parser.add_argument("--uv", default="uv", help="the program uv, which fetches the validator [%(default)s]")
    options = parser.parse_args()
    try:
        with docker_engine() as engine:
            if options.tag is None:
                build_image(engine)
            found = look(engine, options.tag or IMAGE)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    document = bill(found)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n")
    validate = [
        options.uv,
        "run",
        "--quiet",
        "--no-project",
        "--isolated",
        "--with",
        VALIDATOR,
        "python",
        "-c",
        VALIDATE,
    ]
    if (code := subprocess.run([*validate, str(options.output)], check=False).returncode) != 0:
        return code
    packages, debian = len(found["packages"]), len(found["debian"])
    print(f"{options.output}: {packages} Python packages, {debian} of Debian, Python {found['python']}, the model")
    return 0


def look(engine: DockerEngine, tag: str) -> dict[str, Any]:
    """Return what is installed in an image, as the image's own Python sees it."""
    done = engine.docker("run", "--rm", "--network", "none", "--entrypoint", "python", tag, "-c", LOOK)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bill(found: dict[str, Any]) -> dict[str, Any]:
    """Return the CycloneDX document; the same contents give the same document."""
    own = [it for it in found["packages"] if it["name"] == "kp-worker"]
    components = [python_package(it) for it in found["packages"] if it not in own]
    components += [debian_package(it, found["distro"]) for it in found["debian"]]
    components.append(component("application", "cpython", found["python"], f"pkg:generic/cpython@{found['python']}"))
    components += [model_file(it) for it in found["model"]]
    components.sort(key=lambda it: (it["type"], it["bom-ref"]))
    version = own[0]["version"]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(components, sort_keys=True))}",
        "version": 1,
        "metadata": {"component": component("container", "kp-worker", version, f"pkg:oci/kp-worker@{version}")},
        "components": components,
    }


def component(kind: str, name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def python_package(it: dict[str, str]) -> dict[str, Any]:
    name = it["name"].lower().replace("_", "-").replace(".", "-")
    made = component("library", it["name"], it["version"], f"pkg:pypi/{name}@{it['version']}")
    return made | ({"licenses": [{"license": {"name": it["license"]}}]} if it["license"] else {})


def debian_package(it: dict[str, str], distro: str) -> dict[str, Any]:
    version = it["version"].replace("+", "%2B").replace(":", "%3A").replace("~", "~")
    purl = f"pkg:deb/debian/{it['name']}@{version}?arch={it['architecture']}&distro={distro}"
    return component("library", it["name"], it["version"], purl)


def model_file(it: dict[str, str]) -> dict[str, Any]:
    made = {"type": "machine-learning-model", "bom-ref": f"model/{it['name']}", "name": it["name"]}
    return made | {"hashes": [{"alg": "SHA-256", "content": it["sha256"]}]}


if __name__ == "__main__":
    sys.exit(main())
