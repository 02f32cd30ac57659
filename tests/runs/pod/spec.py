"""A pod's spec as the options of `docker run`: what the kubelet asks of a container runtime.

Volumes become what the kubelet makes of them: a Secret or ConfigMap is a read-only directory whose files are links into
a `..data` that is exchanged as a whole, with the pod's fsGroup; an emptyDir is a tmpfs of its size,
which a restart of the container empties.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

Object = dict[str, Any]
Sources = Mapping[tuple[str, str], Mapping[str, bytes]]
"""(Secret or ConfigMap, name) -> key -> contents."""

UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
SECURITY: Final = {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}
POD_SECURITY: Final = {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "seccompProfile"}


class SpecError(ValueError):
    """A pod asks for something that this check cannot give it."""


def quantity(text: str | float) -> float:
    """Return a quantity of Kubernetes as a number: "500m" is 0.5, "1Gi" is 2^30."""
    found = re.fullmatch(r"([0-9.]+)(m|k|M|G|Ki|Mi|Gi)?", str(text))
    if not found:
        raise SpecError(f"no quantity: {text}")
    number = float(found[1])
    return number / 1000 if found[2] == "m" else number * UNITS[found[2] or ""]


def run_options(pod: Object, image: str, network: str, directory: Path, sources: Sources) -> list[str]:
    """Return the arguments of `docker run` for the pod's one container; `directory` holds its volumes.

    Raises SpecError for what is not carried over, so that nothing is left out in silence.
    """
    spec = pod["spec"]
    (container,) = spec["containers"]
    return [
        "--detach", "--name", container_name(network, pod), "--hostname", pod["metadata"]["name"], "--network", network,
        "--no-healthcheck",  # the kubelet knows its own probes alone
        *_security(spec["securityContext"], container["securityContext"]),
        *_resources(container["resources"]),
        *(f"--env={key}={value}" for key, value in environment(pod, sources).items()),
        *_mounts(spec, container, directory, sources),
        image, *container["args"],
    ]  # fmt: skip


def container_name(network: str, pod: Object) -> str:
    """Return the name that no other run in the engine uses."""
    return f"{network}-{pod['metadata']['name']}"


def environment(pod: Object, sources: Sources) -> dict[str, str]:
    """Return the container's variables, with what their valueFrom refers to."""
    (container,) = pod["spec"]["containers"]
    found = {}
    for item in container["env"]:
        found[item["name"]] = item["value"] if "value" in item else _value_from(item["valueFrom"], pod, sources)
    return found


def _value_from(source: Object, pod: Object, sources: Sources) -> str:
    match source:
        case {"secretKeyRef": {"name": name, "key": key}}:
            return sources["Secret", name][key].decode()
        case {"fieldRef": {"fieldPath": "metadata.name"}}:
            return str(pod["metadata"]["name"])
        case {"resourceFieldRef": {"resource": "requests.cpu", "divisor": divisor}}:
            (container,) = pod["spec"]["containers"]
            return str(math.ceil(quantity(container["resources"]["requests"]["cpu"]) / quantity(divisor)))
    raise SpecError(f"valueFrom: {source}")


def _security(pod: Object, container: Object) -> Iterator[str]:
    if unknown := (pod.keys() - POD_SECURITY) | (container.keys() - SECURITY):
        raise SpecError(f"securityContext: {sorted(unknown)}")
    if pod["runAsNonRoot"] and pod["runAsUser"] == 0:
        raise SpecError("runAsNonRoot with user 0: the kubelet would not start it")
    yield from ("--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--group-add", str(pod["fsGroup"]))
    if pod["seccompProfile"] != {"type": "RuntimeDefault"}:  # the engine's own default
        raise SpecError(f"seccompProfile: {pod['seccompProfile']}")
    if container["readOnlyRootFilesystem"]:
        yield "--read-only"
    if not container["allowPrivilegeEscalation"]:
        yield from ("--security-opt", "no-new-privileges")
    for name in container["capabilities"].pop("drop"):
        yield from ("--cap-drop", name)
    if container["capabilities"]:
        raise SpecError(f"capabilities: {container['capabilities']}")


def _resources(resources: Object) -> Iterator[str]:
    limits = resources.get("limits", {})
    if "memory" in limits:
        most = f"{quantity(limits['memory']):.0f}"
        yield from ("--memory", most, "--memory-swap", most)
    if "cpu" in limits:
        yield from ("--cpus", str(quantity(limits["cpu"])))
    yield from ("--cpu-shares", f"{1024 * quantity(resources['requests']['cpu']):.0f}")


def _mounts(spec: Object, container: Object, directory: Path, sources: Sources) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    group = spec["securityContext"]["fsGroup"]
    for mount in container["volumeMounts"]:
        match volumes[mount["name"]]:
            case {"emptyDir": empty}:
                size = f"{quantity(empty['sizeLimit']):.0f}"
                yield f"--tmpfs={mount['mountPath']}:rw,exec,size={size},mode=2777,gid={group}"
                continue
            case {"secret": {"secretName": source, "defaultMode": mode}}:
                contents = sources["Secret", source]
            case {"configMap": {"name": source}}:
                contents, mode = sources["ConfigMap", source], 0o644
            case other:
                raise SpecError(f"volume: {json.dumps(other)}")
        place = directory / mount["name"]
        project(place, contents, mode, group)
        yield f"--volume={place}:{mount['mountPath']}" + (":ro" if mount.get("readOnly") else "")


def project(place: Path, contents: Mapping[str, bytes], mode: int, group: int) -> None:
    """Write a Secret or ConfigMap as the kubelet does; again, to renew its files in one step."""
    fresh = place / f"..{os.urandom(4).hex()}"
    fresh.mkdir(parents=True)
    for key, value in contents.items():
        path = fresh / key
        path.write_bytes(value)
        os.chown(path, 0, group)
        path.chmod(mode)
    for path, bits in ((place, 0o2755), (fresh, 0o2755)):
        os.chown(path, 0, group)
        path.chmod(bits)
    link = place / "..data_tmp"
    link.symlink_to(fresh.name)
    link.replace(place / "..data")
    for key in contents:
        if not (place / key).is_symlink():
            (place / key).symlink_to(f"..data/{key}")
