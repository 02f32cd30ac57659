"""The config file: which source wins, what is wrong with a file, and where each error says it is."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from tests.support.generated import config_schema
from worker.cli import cli
from worker.config import ConfigError, Settings, describe, load, read
from worker.config.loading import parse_assignments
from worker.core.scoring import PROFILES, Weights

EVEN = {"complexity": 0.25, "novelty": 0.25, "tool_diversity": 0.25, "outcome_confidence": 0.25}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kp.toml"


def errors(file: Path, options: Mapping[str, Any] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, options)
    return str(caught.value).split("\n")


def toml(values: Mapping[str, Any]) -> str:
    """Write flat values as TOML."""
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())


# -- which source wins


def test_a_file_gives_settings_and_profiles(file: Path) -> None:
    file.write_text(
        'threshold = 0.6\ncache_ttl_seconds = "none"\ncreate_topics = true\nsasl_mechanism = "PLAIN"\n'
        'security_protocol = "SASL_SSL"\nsasl_username = "u"\nsasl_password_file = "/p"\n'
        '[profiles.code]\nthreshold = 0.8\n[profiles."a b".weights]\n' + toml(EVEN)
    )
    settings = load(file)
    assert (settings.threshold, settings.cache_ttl_seconds, settings.create_topics) == (0.6, None, True)
    assert settings.sasl_password_file == Path("/p")
    profiles = settings.scoring_profiles()
    assert (profiles["code"].weights, profiles["code"].threshold) == (PROFILES["code"].weights, 0.8)
    assert profiles["a b"].weights == Weights(**EVEN)


def test_kp_config_names_a_file_an_argument_wins(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("threshold = 0.6")
    monkeypatch.setenv("KP_CONFIG", str(file))
    assert load().threshold == 0.6
    assert read().warnings == ()
    other = tmp_path / "other.toml"
    other.write_text("max_steps = 7")
    assert (load(other).threshold, load(other).max_steps) == (0.75, 7)
    monkeypatch.setenv("KP_CONFIG", "")
    assert load().threshold == 0.75


@pytest.mark.slow
def test_the_first_source_that_gives_a_setting_wins(file: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against an oracle of a dict a source, over random subsets of settings in each source."""
    chance = random.Random(seed)
    names = ("threshold", "latency_budget_seconds", "stuck_seconds", "session_timeout_seconds", "max_steps")
    for _ in range(50):
        call, options, variables, values = (
            {name: chance.randrange(2, 100) / (100 if name == "threshold" else 1)
             for name in chance.sample(names, chance.randrange(len(names) + 1))}
            for _ in range(4)
        )  # fmt: skip
        for whole in (call, options, variables, values):
            if "max_steps" in whole:
                whole["max_steps"] = int(whole["max_steps"])
        file.write_text(toml(values))
        for name in names:
            monkeypatch.delenv(f"KP_{name.upper()}", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"KP_{name.upper()}", str(value))
        loaded = read(file, {name: str(value) for name, value in options.items()}, **call)
        expected = values | variables | options | call
        assert {name: getattr(loaded.settings, name) for name in expected} == expected
        for name in names:
            place = (
                f"KP_{name.upper()}" if name in call or (name in variables and name not in options)
                else f"--set {name}" if name in options else str(file) if name in values else "default"
            )  # fmt: skip
            assert loaded.origin((name,)) == place


def test_profiles_of_several_sources_are_merged_key_by_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KP_PROFILES does not replace the file's profiles: it changes those it names, and of those only what it names."""
    file.write_text("[profiles.code]\nthreshold = 0.8\n[profiles.code.weights]\n" + toml(EVEN))
    monkeypatch.setenv("KP_PROFILES", '{"code": {"threshold": 0.9}, "legal": {"threshold": 0.5}}')
    options = parse_assignments(["profiles.legal.threshold=0.4"])
    loaded = read(file, options)
    profiles = loaded.settings.scoring_profiles()
    assert (profiles["code"].weights, profiles["code"].threshold) == (Weights(**EVEN), 0.9)
    assert profiles["legal"].threshold == 0.4
    assert loaded.origin(("profiles", "code", "threshold")) == "KP_PROFILES"
    assert loaded.origin(("profiles", "code", "weights")) == str(file)
    assert loaded.origin(("profiles", "legal", "threshold")) == "--set profiles.legal.threshold"


# -- what is wrong


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("treshold = 1", ": treshold is not a setting; did you mean threshold?"),
        ('KP_GROUP_ID = "x"', ": KP_GROUP_ID is not a setting; did you mean group_id?"),
        ('[kafka]\nbrokers = "x"', ": kafka is not a setting"),
        ("threshold = 2", ": threshold = 2 is wrong: it must be less than or equal to 1 (lowest score"),
        ("threshold = nan", ": threshold = nan is wrong: it must be"),
        ('threshold = "high"', ": threshold = 'high' is wrong: give a number"),
        ("max_steps = true", ": max_steps = true is wrong"),
        ("max_steps = 1.5", ": max_steps = 1.5 is wrong: give a whole number"),
        ("create_topics = 3", ": create_topics = 3 is wrong: give true or false"),
        ("group_id = 3", ": group_id = 3 is wrong: give text"),
        ("embed_in_flight = 0", ": embed_in_flight = 0 is wrong: give auto, or a number from 1 to 64 (most texts"),
        ("group_id = 2026-01-01", ": group_id = 2026-01-01 is wrong: give text"),
        ('source_topic = "a b"', ": source_topic = 'a b' is wrong: it must match pattern"),
        ("profiles = 3", ": profiles = 3 is wrong: give a table"),
        ("[profiles]\ncode = 3", ": profiles.code = 3 is wrong: give a table with weights, threshold or both"),
        (
            "[profiles.code]\ntreshold = 1",
            ": profiles.code.treshold = 1 is wrong: it is not a key of a profile; did you",
        ),
        ("[profiles.code]\nthreshold = 2", ": profiles.code.threshold = 2 is wrong: it must be less"),
        ("[profiles.code.weights]\nnovelty = 1", ": profiles.code.weights = "),
        ('[profiles."a b"]\nthreshold = 2', ': profiles."a b".threshold = 2 is wrong'),
        ('sasl_password = ["x"]', ": sasl_password = (not shown) is wrong"),
        ('tls_ca_file = "-----BEGIN CERTIFICATE-----"', ": tls_ca_file = (not shown) is wrong: give the path"),
    ],
)
def test_an_error_names_the_file_the_key_and_what_is_allowed(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    (line,) = errors(file)
    assert line.startswith(f"{file}{words}")


def test_all_errors_are_told_also_hidden_ones(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("threshold = 2\nx = 1\nmax_steps = 0\n")
    monkeypatch.setenv("KP_THRESHOLD", "0.5")
    monkeypatch.setenv("KP_HTTP_PORT", "x")
    shown = [line.removeprefix(f"{file}: ").split(" ")[0] for line in errors(file, {"max_depth": "0"})]
    assert shown == ["x", "max_steps", "--set", "KP_HTTP_PORT='x'", "threshold"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"threshold = ", "is not TOML: Invalid value (at end of document)"),
        (b"[a\nb = 1", "is not TOML:"),
        (b"max_steps = 0x" + b"f" * 5000, "is not TOML: Exceeds the limit (4300 digits)"),
        (b"a = '\xff'", "is not TOML: byte 5 is not UTF-8"),
        (b"threshold = " + b"[" * 5000 + b"]" * 5000, "a value is nested too deeply"),
        (b".".join([b"a"] * 5000) + b" = 1", "a value is nested too deeply"),
        (b"profiles.code." + b".".join([b"a"] * 700) + b" = 1", ""),  # whether too deeply depends on Python
        (b"\n\nthreshold = " + b"9" * 5000 + b" # 1", "is not TOML: Exceeds the limit"),
        (None, "cannot read"),
    ],
    ids=lambda it: repr(it)[:30],
)
def test_a_file_that_is_none(file: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        file.write_bytes(content)
    (line,) = errors(file)
    assert words in line
    assert str(file) in line
    assert "is not a file" in errors(file.parent)[0]


@pytest.mark.parametrize(
    "assignment",
    ["threshold", "threshold=", "=1", "a b=1", "a.=1", "a\n[b]\nc=1", '"a=1', "#a=1", "[a]#=1", "[[a]]\nb=1", ""],
)
def test_an_assignment_that_is_none(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_assignments([assignment])


def test_a_variable_that_is_nested_too_deeply_is_refused() -> None:
    code, out, err = run("check", KP_PROFILES="[" * 100_000)
    assert (code, out) == (2, "")
    assert "nested too deeply" in err


SECRET = "S3CRETvalue"


@pytest.mark.parametrize(
    "command", [["config", "check"], ["run"], ["doctor"], ["convert", "--from", "chat"], ["explain"]]
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", f"sasl_password {SECRET}"],
        ["--set", f"sasl_password:{SECRET}=="],
        ["--set", f"sasl_password: {SECRET}=="],
        ["--set", f"sasl_password {SECRET}="],
        ["--set", f"{SECRET}\n"],
        ["--set", "sasl_password", SECRET],
        ["--set", "sasl_password", "=", SECRET],
    ],
)
def test_no_error_repeats_what_may_be_the_value_of_a_secret(command: list[str], arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, *arguments])
    assert result.exit_code == 2, result.output
    assert "NAME=VALUE" in result.output
    assert SECRET not in result.output


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["run"], "{} too many"),
        (["topics"], "{} too many"),
        (["config", "show"], "{} too many"),
        (["score", "-"], "is no file"),
        (["publish", "-"], "is no file"),
        (["report"], "is no file"),
    ],
)
def test_no_error_repeats_an_argument_too_many(command: list[str], error: str) -> None:
    """Whoever forgets --set writes one."""
    for number in (1, 2):
        result = CliRunner().invoke(cli, [*command, *[f"sasl_password={SECRET}"] * number])
        assert result.exit_code == 2
        assert error.format(f"{number} argument{'s' * (number - 1)}") in result.output
        assert "--set NAME=VALUE" in result.output
        assert SECRET not in result.output


@pytest.mark.parametrize(
    "text",
    [
        f'threshold = 0.5\n[profiles.code]\nsasl_password = "{SECRET}"',  # the table goes on to the end of the file
        f'threshold = 0.5\n[profiles.code]\nsasl_pasword = "{SECRET}"',
        f'[threshold]\nregistry_key = "{SECRET}"',
        f'[profiles.code.weights]\nnovelty = ["{SECRET}"]',
        f'sasl_password = ["{SECRET}"]',
        f'registry_url = "ftp://{SECRET}"',
        f'bootstrap_servers = "SASL://kp:{SECRET}@kafka:9092"',
    ],
)
def test_no_error_about_a_file_shows_a_secret(file: Path, text: str) -> None:
    file.write_text(text)
    shown = "\n".join(errors(file))
    assert "is wrong" in shown
    assert SECRET not in shown
    for form in ("--json", "--text"):  # what is wrong is shown as it is written
        code, out, err = run("show", form, "--config", str(file))
        assert code == 2
        assert "max_steps" in out
        assert err == f"Error: {shown}\n"
        assert SECRET not in out


def test_no_error_about_a_variable_or_an_option_shows_a_secret() -> None:
    profiles = json.dumps({"code": {"threshold": 7, "sasl_password": SECRET, "note": SECRET}})
    for arguments, variables in (
        ([], {"KP_PROFILES": profiles}),
        ([], {"KP_REGISTRY_URL": f"https//kp:{SECRET}@host"}),
        ([], {"KP_BOOTSTRAP_SERVERS": f"https://kp:{SECRET}@host"}),
        (["--set", f"sasl_password.x={SECRET}"], {}),
        (["--set", f"profiles.code.registry_key={SECRET}"], {}),
        (["--set", f"sasl_password{SECRET}=="], {}),
        (["--set", f"KP_REGISTRY-KEY{SECRET}=="], {}),
    ):
        code, _, err = run("check", *arguments, **variables)
        assert code == 2
        assert SECRET not in err
    assert (
        "sasl_password... is not a setting; did you mean sasl_password?" in run("check", "--set", "sasl_passwordX=1")[2]
    )


@pytest.mark.parametrize(
    ("variable", "content", "words"),
    [
        ("KP_VERDICT_KEY_FILE", "ci short", "less than 32 bytes"),
        ("KP_VERDICT_KEY_FILE", "", "is empty"),
        ("KP_REGISTRY_KEY_FILE", "two words", "more than one word"),
        ("KP_REDACT_PATTERNS_FILE", "[[pattern]]", "pattern"),
        ("KP_TLS_CA_FILE", "no certificate", "PEM file of certificates"),
    ],
)
def test_check_reads_the_files_that_settings_name(tmp_path: Path, variable: str, content: str, words: str) -> None:
    named = tmp_path / "named"
    settings = {variable: str(named)} | ({"KP_SECURITY_PROTOCOL": "SSL"} if "TLS" in variable else {})
    code, _, err = run("check", **settings)
    assert code == 0
    assert f"warning: {variable}={named} is not on this machine" in err
    assert run("check", "--strict", **settings)[0] == 1
    named.write_text(content)
    code, _, err = run("check", **settings)
    assert code == 2
    assert words in err


def test_assignments_are_nested_and_the_last_one_wins() -> None:
    given = parse_assignments(["a=1", "b.c=2", 'b."d.e"=x=y', "a=3"])
    assert given == {"a": "3", "b": {"c": "2", "d.e": "x=y"}}
    with pytest.raises(ConfigError, match="a has a value already"):
        parse_assignments(["a=1", "a.b=2"])


# -- the commands


def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["config", *arguments], env=variables)
    return result.exit_code, result.stdout, result.stderr


def test_check_says_what_it_read_and_what_another_source_overrides(file: Path) -> None:
    file.write_text("threshold = 0.5\nmax_steps = 3")
    code, out, _ = run("check", str(file), KP_THRESHOLD="0.7")
    assert code == 0
    assert out == (
        f"{file}: ok, 2 settings\nset there, and overridden: threshold by KP_THRESHOLD\n"
        "set elsewhere: KP_THRESHOLD: ok\n"
    )
    assert run("check") == (0, "nothing is set: all settings have their defaults\n", "")


def test_check_warns_of_a_misspelt_variable_and_with_strict_exits_with_1() -> None:
    for option, wanted in ((), 0), (("--strict",), 1):
        code, _, err = run("check", *option, KP_TRESHOLD="0.7")
        assert code == wanted
        assert "KP_TRESHOLD" in err
        assert "KP_THRESHOLD" in err
    assert run("check", "--strict", KP_THRESHOLD="0.7")[0] == 0
    assert run("check", "--strict", KP_THRESHOLD="7", KP_TRESHOLD="1")[0] == 2


def test_show_tells_value_and_origin_and_hides_secrets(file: Path) -> None:
    file.write_text(
        'sasl_password = "hunter2"\nsasl_username = "u"\nsasl_mechanism = "PLAIN"\nsecurity_protocol = "SASL_SSL"\n'
        'tls_key_password = "hunter2"\ntls_certificate_file = "/c"\n[profiles.code]\nthreshold = 0.5\n'
    )
    code, out, _ = run("show", "--json", "--config", str(file), "-g", "mine", KP_MAX_STEPS="3")
    assert code == 0
    assert "hunter2" not in out
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert rows["sasl_password"] == {
        "name": "sasl_password", "value": "(set, not shown)", "origin": str(file), "variable": "KP_SASL_PASSWORD",
    }  # fmt: skip
    expected = {
        "group_id": ("mine", "--group"), "changelog_topic": ("mine-novelty-changelog", "default"),
        "max_steps": (3, "KP_MAX_STEPS"), "profiles.code.threshold": (0.5, str(file)),
        "profiles.medical.threshold": (0.75, "threshold"),
    }  # fmt: skip
    assert {name: (rows[name]["value"], rows[name]["origin"]) for name in expected} == expected
    assert set(Settings.model_fields) - {"profiles"} <= rows.keys()
    code, out, _ = run("show", "--text", "--changed", "--config", str(file))
    assert [line.split()[0] for line in out.splitlines()] == [
        "security_protocol", "sasl_mechanism", "sasl_username", "sasl_password", "tls_certificate_file",
        "tls_key_password", "profiles.code.threshold",
    ]  # fmt: skip


def test_show_tells_where_conflicting_settings_come_from(file: Path) -> None:
    file.write_text("[profiles.code]\nthreshold = 3\n")
    variables = {"KP_DELIVERY": "at_least_once", "KP_GROUP_INSTANCE_ID": "one"}
    code, out, err = run("show", "--text", "--changed", "--config", str(file), **variables)
    assert code == 2
    assert [line.split() for line in out.splitlines()] == [
        ["group_instance_id", "one", "KP_GROUP_INSTANCE_ID"],
        ["delivery", "at_least_once", "KP_DELIVERY"],
        ["profiles.code.threshold", "3", str(file)],
    ]
    assert "profiles.code.threshold = 3 is wrong" in err


# -- the schema


def test_the_schema_takes_what_the_worker_takes() -> None:
    Draft202012Validator.check_schema(config_schema())
    validator = Draft202012Validator(config_schema())
    defaults = {name: default for name, default in Settings().model_dump(mode="json").items() if default is not None}
    validator.validate(defaults)
    assert set(config_schema()["properties"]) == {name.removeprefix("KP_").lower() for name, _, _ in describe()}
    validator.validate({"cache_ttl_seconds": "none", "profiles": {"x": {"threshold": 1, "weights": EVEN}, "code": {}}})


@pytest.mark.parametrize(
    "values",
    [
        {"treshold": 1},
        {"threshold": 2},
        {"cache_ttl_seconds": "never"},
        {"cache_ttl_seconds": 0},
        {"embedder": "magic"},
        {"profiles": {"x": {"weights": {"novelty": 1}}}},
        {"profiles": {"x": {"treshold": 1}}},
        {"source_topic": "a b"},
    ],
)
def test_the_schema_refuses_what_the_worker_refuses(values: dict[str, Any]) -> None:
    assert not Draft202012Validator(config_schema()).is_valid(values)
