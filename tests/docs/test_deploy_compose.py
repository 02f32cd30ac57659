"""docker-compose.yml against the code: names, versions, topic settings. deploy/checks/compose.sh checks its syntax."""

import re
import tomllib
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.support.generated import config_schema
from tests.support.surroundings import ROOT
from worker.assemble.steps import rules_from
from worker.config import Settings, describe, load
from worker.kafka.topics import (
    AFTER,
    CHANGELOG_CONFIG,
    DEAD_LETTER_OVERHEAD,
    DEFAULT_MAX_BYTES,
    OUTPUT_OVERHEAD,
    SOURCE_AFTER_MS,
)
from worker.lab.broker.kafka_jars import KAFKA_VERSION
from worker.version import __version__

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
WORKERS = ("worker", "samples", "contribute", "assemble")


def test_versions_are_pinned_and_ours() -> None:
    assert all(re.search(r":v?\d+\.\d+\.\d+$", service["image"]) for service in SERVICES.values())
    assert SERVICES["kafka"]["image"] == SERVICES["topics"]["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert {SERVICES[name]["image"] for name in WORKERS} == {f"kp-worker:{__version__}"}


def test_topics_are_those_that_the_worker_would_create() -> None:
    (script,) = SERVICES["topics"]["command"]
    topics = {
        line.split()[1]: dict(option.split("=") for option in re.findall(r"--config (\S+)", line))
        for line in script.replace("\\\n", " ").splitlines()
        if line.startswith("create ")
    }
    settings = Settings()
    output = {"max.message.bytes": str(settings.max_message_bytes + OUTPUT_OVERHEAD)}
    assert topics == {
        settings.source_topic: {AFTER: str(SOURCE_AFTER_MS)},
        settings.accepted_topic: output,
        settings.rejected_topic: output,
        settings.dead_letter_topic: {"max.message.bytes": str(DEFAULT_MAX_BYTES + DEAD_LETTER_OVERHEAD)},
        settings.changelog: dict(CHANGELOG_CONFIG),
    }
    assert f"--partitions {settings.topic_partitions} " in script


def test_workers_are_hardened_and_can_be_scaled() -> None:
    known = {name for name, _, _ in describe()} | {"KP_CONFIG"}
    for name in WORKERS:
        service = SERVICES[name]
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pull_policy"] == "build"
        assert set(service["environment"]) <= known
        assert not {"ports", "container_name"} & service.keys()
    for name in ("worker", "contribute", "assemble"):
        assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) > Settings().shutdown_timeout_seconds


def test_workers_read_the_config_file_that_is_mounted() -> None:
    for service in (SERVICES[name] for name in WORKERS):
        mounts = [mount.removesuffix(":ro").split(":") for mount in service["volumes"]]
        (source,) = (source for source, target in mounts if target == service["environment"]["KP_CONFIG"])
        text = (ROOT / source).read_text("utf-8")
        assert load(ROOT / source).log_format == "json"
        # The lines that are commented out must be right, too.
        examples = re.sub(r"^# (?=[a-z\[])", "", text.split("\n\n", 1)[1], flags=re.MULTILINE)
        assert tomllib.loads(examples)["profiles"]["legal"]["threshold"] == 0.6
        Draft202012Validator(config_schema()).validate(tomllib.loads(examples))


def test_start_order_waits_for_something_that_happens() -> None:
    for service in SERVICES.values():
        for name, dependency in service.get("depends_on", {}).items():
            if dependency["condition"] == "service_healthy":
                assert "test" in SERVICES[name]["healthcheck"]
            else:
                assert dependency["condition"] == "service_completed_successfully"
                assert "restart" not in SERVICES[name]


def test_only_this_machine_reaches_the_ports_no_secrets_are_there_and_mounts_exist() -> None:
    ports, names, mounts = (
        [each for service in SERVICES.values() for each in service.get(part, ())]
        for part in ("ports", "environment", "volumes")
    )
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not [name for name in names if re.search("PASSWORD|SECRET|TOKEN|JAAS", name)]
    for source in (mount.split(":")[0] for mount in mounts):
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source


def test_contribute_takes_the_registry_of_the_environment_and_no_other_profile_needs_one() -> None:
    """Compose reads the variables of all services before it chooses a profile's."""
    environment = SERVICES["contribute"]["environment"]
    assert SERVICES["contribute"]["profiles"] == ["contribute"]
    assert all(environment[name] == f"${{{name}:-}}" for name in ("KP_REGISTRY_URL", "KP_REGISTRY_KEY"))
    assert ":?" not in (ROOT / "docker-compose.yml").read_text("utf-8").replace("${...:?}", "")


def test_assemble_has_all_that_it_needs() -> None:
    environment = SERVICES["assemble"]["environment"]
    given = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for name, value in environment.items()}
    settings = Settings(**{name[3:].lower(): value for name, value in given.items() if name != "KP_CONFIG"})
    assert rules_from(settings).confidence.constant == 0.7
    assert all(environment[name].startswith(f"${{{name}:-") for name in environment if name.startswith("KP_ASSEMBLE"))


def test_prometheus_finds_every_worker() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    names = ("worker", "contribute", "assemble")
    assert {job["job_name"]: job["dns_sd_configs"] for job in config["scrape_configs"]} == {
        f"kp-{name}": [{"names": [name], "type": "A", "port": Settings().http_port, "refresh_interval": "5s"}]
        for name in names
    }
    assert all("KP_HTTP_PORT" not in SERVICES[name]["environment"] for name in names)
