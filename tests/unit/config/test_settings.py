"""Settings: every one described, every wrong one explained by variable, value and what is allowed."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from worker import Weights
from worker.cli import cli
from worker.config import PREFIX, ConfigError, Loaded, Settings, describe, load, read
from worker.config.loading import REMOVED
from worker.core.scoring import PROFILES

ROWS = {name: (default, meaning) for name, default, meaning in describe()}

CONTRACT = {
    "KP_BOOTSTRAP_SERVERS": "127.0.0.1:9092",
    "KP_GROUP_ID": "kp-worker",
    "KP_SOURCE_TOPIC": "traces",
    "KP_ACCEPTED_TOPIC": "traces.accepted",
    "KP_REJECTED_TOPIC": "traces.rejected",
    "KP_DEAD_LETTER_TOPIC": "traces.dead-letter",
    "KP_CHANGELOG_TOPIC": "",
    "KP_THRESHOLD": "0.75",
    "KP_DELIVERY": "exactly_once",
    "KP_EMBEDDER": "auto",
    "KP_PRECISION": "fp32",
    "KP_MODEL": "",
    "KP_MAX_TOKENS": "256",
    "KP_CACHE_MAX_ELEMENTS": "1000",
    "KP_CACHE_TTL_SECONDS": "3600",
    "KP_EVENT_TIME": "created_at",
    "KP_LATENCY_BUDGET_SECONDS": "0.1",
    "KP_HTTP_PORT": "9108",
    "KP_CREATE_TOPICS": "false",
    "KP_LOG_FORMAT": "text",
}


def read_with(**variables: str) -> Loaded:
    """Read the settings with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return read()


def load_with(**variables: str) -> Settings:
    return read_with(**variables).settings


def error_of(**variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_with(**variables)
    return str(caught.value)


# -- the description


def test_every_setting_is_described_once_and_in_order() -> None:
    assert list(ROWS) == [PREFIX + name.upper() for name in Settings.model_fields]
    assert len(ROWS) == len(describe())
    for name, (_, meaning) in ROWS.items():
        assert len(meaning) > 10, name
        assert "\n" not in meaning, name
        assert "|" not in meaning.split(": ")[-1], name  # would break a table


def test_names_and_defaults_are_those_of_the_contract() -> None:
    assert {name: ROWS[name][0] for name in CONTRACT} == CONTRACT


def test_the_values_of_a_closed_setting_are_listed() -> None:
    assert ROWS["KP_DELIVERY"][1].startswith("exactly_once | at_least_once: ")
    assert ROWS["KP_EVENT_TIME"][1].startswith("created_at | record: ")


def test_a_described_default_is_what_the_setting_is_without_a_value() -> None:
    assert load_with(**{name: default for name, (default, _) in ROWS.items()}) == load()


def test_run_s_help_lists_every_setting() -> None:
    result = CliRunner().invoke(cli, ["run", "--help"], terminal_width=200)
    assert result.exit_code == 0
    for name, (default, _) in ROWS.items():
        assert f"{name}={default}" in result.output


# -- values


def test_settings_are_read_from_the_environment_and_what_is_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDER", "auto")
    monkeypatch.setenv("KP_MODEL", "/models/x")
    given = load(embedder="none", model=None)
    assert (given.embedder, given.model) == ("none", "/models/x")
    settings = load_with(
        KP_GROUP_ID="g", KP_THRESHOLD="0.5", KP_CREATE_TOPICS="true", KP_DELIVERY="at_least_once",
        KP_MAX_DEPTH="99", KP_STRICT_CONTEXT="1",
    )  # fmt: skip
    assert (settings.group_id, settings.threshold, settings.create_topics) == ("g", 0.5, True)
    assert (settings.delivery, settings.limits.max_depth, settings.limits.strict_context) == ("at_least_once", 99, True)
    assert settings.changelog == "g-novelty-changelog"
    assert load_with(KP_GROUP_ID="g", KP_CHANGELOG_TOPIC="cache").changelog == "cache"


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert load_with(KP_MODEL="", KP_CHANGELOG_TOPIC="", KP_HTTP_PORT="", KP_PROFILES="") == Settings()


@pytest.mark.parametrize(
    ("value", "ms"), [("none", None), (" NONE ", None), ("0.5", 500), ("0.0001", 1), ("3600", 3_600_000)]
)
def test_the_lifetime_of_entries(value: str, ms: int | None) -> None:
    assert load_with(KP_CACHE_TTL_SECONDS=value).cache_ttl_ms == ms


# -- errors


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KP_THRESHOLD", "1.5", "less than or equal to 1"),
        ("KP_THRESHOLD", "nan", "equal to"),
        ("KP_THRESHOLD", "much", "number"),
        ("KP_DELIVERY", "twice", "'exactly_once' or 'at_least_once'"),
        ("KP_EMBEDDER", "magic", "'none'"),
        ("KP_EVENT_TIME", "now", "'created_at' or 'record'"),
        ("KP_PRECISION", "fp64", "'fp32'"),
        ("KP_LOG_FORMAT", "xml", "'text' or 'json'"),
        ("KP_HTTP_PORT", "99999", "65535"),
        ("KP_HTTP_PORT", "http", "whole number"),
        ("KP_CACHE_MAX_ELEMENTS", "0", "greater than or equal to 1"),
        ("KP_CACHE_TTL_SECONDS", "0", "greater than 0"),
        ("KP_CACHE_TTL_SECONDS", "never", "number"),
        ("KP_CACHE_TTL_SECONDS", "inf", "finite number"),
        ("KP_MAX_TOKENS", "1", "greater than or equal to 8"),
        ("KP_SOURCE_TOPIC", "no spaces", "pattern"),
        ("KP_CREATE_TOPICS", "maybe", "true or false"),
    ],
)
def test_a_wrong_value_is_explained(name: str, value: str, allowed: str) -> None:
    message = error_of(**{name: value})
    assert message.startswith(f"{name}={value!r} is wrong: ")
    assert allowed in message
    assert ROWS[name][1].split(": ")[-1][:20] in message  # and what the setting is for


def test_a_long_value_is_not_repeated_in_full() -> None:
    assert len(error_of(KP_HTTP_PORT="9" * 10_000)) < 500


def test_a_wrong_option_is_explained_with_the_option_s_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDER", "auto")
    with pytest.raises(ConfigError, match=r"KP_EMBEDDER='magic' is wrong"):
        load(embedder="magic")


@pytest.mark.parametrize(
    "names",
    [
        {"KP_ACCEPTED_TOPIC": "same", "KP_REJECTED_TOPIC": "same"},
        {"KP_SOURCE_TOPIC": "same", "KP_CHANGELOG_TOPIC": "same"},
        {"KP_GROUP_ID": "same", "KP_REJECTED_TOPIC": "same-novelty-changelog"},
    ],
    ids=str,
)
def test_no_two_topics_are_the_same(names: dict[str, str]) -> None:
    message = error_of(**names)
    assert "the topics must differ" in message
    assert "same" in message


def test_unknown_variables_are_told_with_the_nearest_setting() -> None:
    assert read().warnings == ()
    assert read_with(KP_TRESHOLD="1", KP_ZZZZZZZZ="1", KP_THRESHOLD="1", OTHER="1").warnings == (
        "KP_TRESHOLD is not a setting; did you mean KP_THRESHOLD?",
        "KP_ZZZZZZZZ is not a setting",
    )


# -- profiles


def profile(weights: str) -> str:
    """Return a value of KP_PROFILES that gives the domain code these weights."""
    return f'{{"code": {{"weights": {weights}}}}}'


EVEN = '{"complexity": 0.25, "novelty": 0.25, "tool_diversity": 0.25, "outcome_confidence": 0.25}'


def test_profiles_are_added_and_changed() -> None:
    assert load().scoring_profiles() == PROFILES
    given = f'{{"gardening": {{"weights": {EVEN}, "threshold": 0.9}}, "code": {{"threshold": 0.8}}, "a": {{}}}}'
    profiles = load_with(KP_PROFILES=given).scoring_profiles()
    even = Weights(0.25, 0.25, 0.25, 0.25)
    assert set(profiles) == {*PROFILES, "gardening", "a"}
    assert profiles["a"].weights == PROFILES["default"].weights
    assert (profiles["gardening"].weights, profiles["gardening"].threshold) == (even, 0.9)
    assert (profiles["code"].weights, profiles["code"].threshold) == (PROFILES["code"].weights, 0.8)
    assert profiles["finance"] == PROFILES["finance"]


@pytest.mark.parametrize("order", ["default first", "default last"])
def test_a_profile_without_weights_has_those_that_the_default_is_given(order: str) -> None:
    entries = [f'"default": {{"weights": {EVEN}}}', '"gardening": {"threshold": 0.9}']
    given = "{" + ", ".join(entries if order == "default first" else reversed(entries)) + "}"
    profiles = load_with(KP_PROFILES=given).scoring_profiles()
    assert profiles["gardening"].weights == profiles["default"].weights == Weights(0.25, 0.25, 0.25, 0.25)
    assert profiles["code"] == PROFILES["code"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{x", "KP_PROFILES must be JSON (one object)"),
        ("[]", "KP_PROFILES=[] is wrong: give a table: in the config file [profiles.DOMAIN], in a variable a JSON obj"),
        ('{"code": {"threshold": 2}}', "at code.threshold: it must be less than or equal to 1"),
        ('{"code": {"treshold": 0.2}}', "at code.treshold: it is not a key of a profile; did you mean threshold?"),
        (profile('{"novelty": 1}'), "at code.weights: complexity, tool_diversity, outcome_confidence are missing"),
        (
            profile(EVEN.replace("0.25}", "0.5}")),
            "at code.weights: weights must sum to 1, got (0.25, 0.25, 0.25, 0.5) with sum 1.25",
        ),
        (profile('{"speed": 1}'), "at code.weights.speed: it must be 'complexity', 'novelty', "),
        (profile(EVEN.replace("0.25}", "NaN}")), "at code.weights: each weight must lie in 0..1"),
    ],
)
def test_a_wrong_profile_is_explained(value: str, words: str) -> None:
    message = error_of(KP_PROFILES=value)
    assert words in message
    assert "KP_PROFILES" in message


# -- security

SSL = {"KP_SECURITY_PROTOCOL": "SSL"}
SASL = {"KP_SECURITY_PROTOCOL": "SASL_SSL"}
LOGIN = SASL | {"KP_SASL_MECHANISM": "PLAIN", "KP_SASL_USERNAME": "u"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"KP_SASL_MECHANISM": "PLAIN"},
            "KP_SASL_MECHANISM is set, but KP_SECURITY_PROTOCOL=PLAINTEXT uses no SASL; set SASL_SSL",
        ),
        (SSL | {"KP_SASL_PASSWORD": "x"}, "KP_SASL_PASSWORD is set, but KP_SECURITY_PROTOCOL=SSL uses no SASL"),
        ({"KP_SASL_TOKEN_FILE": "/t"}, "KP_SASL_TOKEN_FILE is set, but KP_SECURITY_PROTOCOL=PLAINTEXT uses no SASL"),
        (
            {"KP_TLS_CA_FILE": "/ca"},
            "KP_TLS_CA_FILE is set, but KP_SECURITY_PROTOCOL=PLAINTEXT uses no TLS; set SSL or SASL_SSL",
        ),
        (SSL | {"KP_TLS_KEY_FILE": "/k"}, "KP_TLS_KEY_FILE is set without KP_TLS_CERTIFICATE_FILE; set both"),
        (
            SASL,
            "KP_SECURITY_PROTOCOL=SASL_SSL needs KP_SASL_MECHANISM: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER",
        ),
        (
            {"KP_SECURITY_PROTOCOL": "TLS"},
            "KP_SECURITY_PROTOCOL='TLS' is wrong: it must be 'PLAINTEXT', 'SSL', 'SASL_PLAINTEXT' or 'SASL_SSL'",
        ),
        (LOGIN, "KP_SASL_MECHANISM=PLAIN needs KP_SASL_USERNAME, and KP_SASL_PASSWORD_FILE or KP_SASL_PASSWORD"),
        (LOGIN | {"KP_SASL_USERNAME": "", "KP_SASL_PASSWORD": "x"}, "KP_SASL_MECHANISM=PLAIN needs KP_SASL_USERNAME"),
        (
            LOGIN | {"KP_SASL_PASSWORD": "x", "KP_SASL_PASSWORD_FILE": "/x"},
            "KP_SASL_PASSWORD and KP_SASL_PASSWORD_FILE are both set; keep one",
        ),
        (
            LOGIN | {"KP_SASL_PASSWORD": "x", "KP_SASL_TOKEN_FILE": "/t"},
            "KP_SASL_TOKEN_FILE is set, but KP_SASL_MECHANISM=PLAIN uses a user and a password; unset it",
        ),
        (
            LOGIN | {"KP_SASL_MECHANISM": "OAUTHBEARER"},
            "KP_SASL_USERNAME is set, but KP_SASL_MECHANISM=OAUTHBEARER uses only KP_SASL_TOKEN_FILE; unset it",
        ),
        (SASL | {"KP_SASL_MECHANISM": "OAUTHBEARER"}, "KP_SASL_MECHANISM=OAUTHBEARER needs KP_SASL_TOKEN_FILE"),
        (
            SSL | {"KP_TLS_CA_FILE": "-----BEGIN X-----\nAbC"},
            "KP_TLS_CA_FILE=(not shown) is wrong: give the path of a PEM file, not its content",
        ),
    ],
)
def test_unfit_security_settings_are_explained(variables: dict[str, str], words: str) -> None:
    assert words in error_of(**variables)


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().threshold = 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"spans_topic": "otlp spans"}, "'otlp spans' is not the name of a topic"),
        ({"spans_topic": "a,a"}, "a topic is given twice"),
        ({"spans_topic": "a,"}, "'' is not the name of a topic"),
        ({"spans_topic": "traces"}, "the topics of assemble must differ from all others; traces"),
        ({"spans_topic": "a,b", "spans_keyed": True}, "needs a single KP_SPANS_TOPIC"),
        ({"assemble_gap_seconds": 0}, "greater than 0"),
    ],
)
def test_settings_of_assemble_that_are_wrong(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings.model_validate(given)


def test_names_of_assemble_follow_from_the_group() -> None:
    settings = Settings(group_id="g", spans_topic=" otlp_spans, otlp_logs ")
    assert settings.span_topics == ["otlp_spans", "otlp_logs"]
    assert (settings.assemble_group, settings.assemble_spans) == ("g-assemble", "g-assemble-spans")
    assert settings.assemble_state == "g-assemble-state"
    assert not settings.assembles
    assert Settings(assemble_domain="code").assembles


# -- addresses of brokers


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("kafka:9092", "kafka:9092"),
        (" a.b-c_d:1 , 10.0.0.1:65535", "a.b-c_d:1,10.0.0.1:65535"),
        ("[::1]:9092,[fe80::1%eth0]:9092", "[::1]:9092,[fe80::1%eth0]:9092"),
    ],
)
def test_addresses_are_taken_without_their_spaces(given: str, taken: str) -> None:
    assert load(bootstrap_servers=given).bootstrap_servers == taken


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("http://kafka:9092", "'http://kafka:9092' is a URL"),
        ("a:1,kafka://b:9092", "'kafka://b:9092' is a URL"),
        ("kafka", "'kafka' has no port"),
        ("kafka:", "'kafka:' has no port"),
        ("kafka:0", "a port is a number from 1 to 65535"),
        ("kafka:65536", "a port is a number from 1 to 65535"),
        ("a:1,", "'' is not the address of a broker"),
        ("::1:9092", "'::1:9092' is not the address of a broker"),
        ("ka fka:9092", "'ka fka:9092' is not the address of a broker"),
        ("kafka:\uff11", "is not the address of a broker"),  # a digit, but not ours
    ],
)
def test_another_form_is_named_with_the_right_one(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(bootstrap_servers=given)
    assert "KP_BOOTSTRAP_SERVERS=" in str(error.value)
    assert words in str(error.value)
    assert "give host:port, and several with a comma between them" in str(error.value)


# -- settings of earlier versions


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_setting_that_is_set_is_an_error_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    """An empty variable is unset, and small letters count, as for every setting."""
    variable = f"KP_{name.upper()}"
    assert error_of(**{variable: "x"}) == f"{variable} is no longer a setting: {REMOVED[name]}. Unset it"
    assert error_of(**{variable.lower(): "x"}).startswith(f"{variable} is no longer a setting")
    assert not read_with(**{variable: "", variable.lower(): ""}).warnings
    file = tmp_path / "kp.toml"
    file.write_text(f'{name} = "x"\n')
    with pytest.raises(ConfigError, match=rf"kp.toml: {name} is no longer a setting: .*\. Remove it"):
        load(file)
    with pytest.raises(ConfigError, match=f"--set {name} is no longer a setting: "):
        load(options={name: "x"})
