"""The settings: names, types, defaults, limits and meaning, a class for each section of docs/settings.md.

The sections are joined by inheritance, not nested: so variables, TOML keys and --set names are flat.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from worker.config.checks import (
    SASL,
    TLS,
    TOPIC_NAME,
    check_brokers,
    check_choices,
    check_embedder_url,
    check_path,
    check_registry_url,
    check_security,
    check_topics,
)
from worker.core.records import BATCH_OVERHEAD, RECORD_OVERHEAD
from worker.core.scoring import DEFAULT_PROFILE, PROFILES, Profile, Weights
from worker.core.trace import Limits

PREFIX: Final = "KP_"

TopicName = Annotated[str, Field(pattern=TOPIC_NAME)]
FilePath = Annotated[Path, BeforeValidator(check_path)]

AssembleRule = Annotated[str, Field(min_length=1, max_length=1000)]
"""A constant, or attribute:NAME|CONSTANT; `assemble` reads it."""


def given(section: BaseModel) -> set[str]:
    """Return the fields that have a value."""
    return {name for name in type(section).model_fields if getattr(section, name) is not None}


class KafkaSettings(BaseModel):
    """The brokers, the group, its topics and the login."""

    bootstrap_servers: Annotated[str, AfterValidator(check_brokers)] = Field(
        "127.0.0.1:9092", min_length=1, description="brokers, host:port[,host:port...]"
    )
    group_id: str = Field("kp-worker", min_length=1, description="consumer group, and prefix of the transactional ids")
    group_instance_id: str | None = Field(
        None,
        pattern=r"^[a-zA-Z0-9._-]{1,249}$",
        description="static membership: this worker's unique name; a quick restart then causes no rebalance",
    )
    source_topic: TopicName = Field("traces", description="topic of traces")
    accepted_topic: TopicName = Field("traces.accepted", description="topic of accepted traces")
    rejected_topic: TopicName = Field("traces.rejected", description="topic of rejected traces")
    dead_letter_topic: TopicName = Field("traces.dead-letter", description="topic of dead letters")
    changelog_topic: TopicName | None = Field(
        None, description="compacted topic of the caches (default: <group>-novelty-changelog)"
    )
    judged_topic: TopicName | None = Field(None, description="topic of verdicts that count (default: <source>.judged)")
    create_topics: bool = Field(False, description="create missing topics at startup")
    topic_partitions: int = Field(4, ge=1, le=10_000, description="partitions of a created source topic")
    topic_replication: int = Field(-1, ge=-1, le=100, description="replicas of created topics; -1: broker's default")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="protocol of the brokers (docs/security.md)"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = Field(
        None, description="login mechanism"
    )
    sasl_username: str | None = Field(None, description="user for PLAIN and SCRAM")
    sasl_password: SecretStr | None = Field(None, description="password for PLAIN and SCRAM; better in a file")
    sasl_password_file: FilePath | None = Field(None, description="file with the password")
    sasl_token_file: FilePath | None = Field(None, description="file with OAUTHBEARER's token; read on each connection")
    tls_ca_file: FilePath | None = Field(None, description="PEM file of the brokers' CAs (default: the system's)")
    tls_certificate_file: FilePath | None = Field(None, description="PEM file of the worker's certificate chain (mTLS)")
    tls_key_file: FilePath | None = Field(None, description="PEM file of the key (default: in KP_TLS_CERTIFICATE_FILE)")
    tls_key_password: SecretStr | None = Field(None, description="password of the key; better in a file")
    tls_key_password_file: FilePath | None = Field(None, description="file with the password of the key")
    delivery: Literal["exactly_once", "at_least_once"] = Field("exactly_once", description="delivery guarantee")
    session_timeout_seconds: float = Field(
        15.0, ge=1, le=1800, description="a worker without heartbeats for this long loses its partitions"
    )
    transaction_timeout_seconds: float = Field(
        60.0, ge=1, le=900, description="longest broker outage before the worker exits"
    )
    commit_interval_seconds: float = Field(
        1.0, ge=0, description="with a backlog, longest wait of scored traces to be committed together"
    )

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol in TLS

    @property
    def uses_sasl(self) -> bool:
        """Whether the worker logs in by SASL."""
        return self.security_protocol in SASL

    @property
    def changelog(self) -> str:
        """Name of the changelog topic."""
        return self.changelog_topic or f"{self.group_id}-novelty-changelog"

    @property
    def judged(self) -> str:
        """Name of the topic for what the verdicts say."""
        return self.judged_topic or f"{self.source_topic}.judged"

    @model_validator(mode="after")
    def _check_kafka(self) -> Self:
        if self.group_instance_id and self.delivery != "exactly_once":
            # Two workers under one name take turns without a rebalance; only fenced transactions stop the older one.
            raise ValueError("KP_GROUP_INSTANCE_ID needs KP_DELIVERY=exactly_once; leave one of them out")
        if re.fullmatch(TOPIC_NAME, self.changelog) is None:
            raise ValueError(
                f"KP_GROUP_ID={self.group_id!r} is part of the changelog's name, and {self.changelog!r} is no topic's "
                "name; give letters, digits, dots, _ and -, or set KP_CHANGELOG_TOPIC"
            )
        return self


class ProfileSetting(BaseModel):
    """One profile of the settings: `weights` (four numbers that sum to 1), `threshold` (0..1), or one of them."""

    model_config = ConfigDict(extra="forbid")
    weights: dict[Literal["complexity", "novelty", "tool_diversity", "outcome_confidence"], float] | None = Field(
        None, description="share of each component in the score; all four, and they sum to 1"
    )
    threshold: float | None = Field(None, ge=0, le=1, description="lowest score at which a trace is accepted")

    @field_validator("weights")
    @classmethod
    def _are_weights(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights is not None:
            missing = [name for name in Weights.__dataclass_fields__ if name not in weights]
            if missing:
                raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give all four")
            Weights(**weights)
        return weights


class ScoringSettings(BaseModel):
    """How a trace is scored, and what its output document contains."""

    threshold: float = Field(0.75, ge=0, le=1, description="lowest score at which a trace is accepted")
    profiles: dict[str, ProfileSetting] = Field(
        default_factory=dict,
        description='profiles to add or change, as JSON {"domain": {"weights": {...}, "threshold": 0.8}}',
    )
    cache_max_elements: int = Field(1000, ge=1, le=1_000_000, description="entries of each partition's novelty cache")
    cache_ttl_seconds: float | None = Field(
        3600.0,
        gt=0,
        allow_inf_nan=False,
        description="lifetime of a cache entry in stream time; none: no expiry",
        json_schema_extra={"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "none"}]},
    )
    event_time: Literal["created_at", "record"] = Field(
        "created_at",
        description="a trace's time is its created_at, at most the record's timestamp; or always that timestamp",
    )
    stream_time_max_step_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="how far one trace may advance stream time (docs/security.md)"
    )
    verdict_key_file: FilePath | None = Field(
        None, description="file with the judges' keys (docs/verdicts.md); unset: verdicts become dead letters"
    )
    confidence: Literal["stated", "record"] = Field(
        "stated",
        description="confidence of a trace that claims success: as stated, or from the agent's verdicts "
        "(docs/verdicts.md)",
    )
    output_embedding: bool = Field(False, description="write the embedding into scoring.embedding of the output")
    redact: Literal["off", "accepted", "all"] = Field(
        "off", description="outputs in which secrets and personal data are replaced (docs/redaction.md)"
    )
    redact_rules: Literal["reference", "strict"] | None = Field(
        None, description="rules of redaction (default: reference for KP_REDACT, strict for `contribute`)"
    )
    redact_patterns_file: FilePath | None = Field(None, description="TOML file with your own patterns to redact")
    screen: Literal["off", "mark"] = Field("off", description="mark outputs that have hidden text")

    @field_validator("cache_ttl_seconds", mode="before")
    @classmethod
    def _no_expiry(cls, value: object) -> object:
        return None if isinstance(value, str) and value.strip().lower() == "none" else value

    def scoring_profiles(self) -> Mapping[str, Profile]:
        """Return the built-in profiles with those of the settings over them; one without weights has the default's."""
        result = dict(PROFILES)
        # The default first: whatever the order, a profile without weights has the default's as they are configured.
        for domain, setting in sorted(self.profiles.items(), key=lambda item: item[0] != DEFAULT_PROFILE):
            weights = result.get(domain, result[DEFAULT_PROFILE]).weights
            if setting.weights is not None:
                weights = Weights(**setting.weights)
            result[domain] = Profile(weights, setting.threshold)
        return result

    @property
    def cache_ttl_ms(self) -> int | None:
        """Life of a cache entry, ms; None: no expiry."""
        return None if self.cache_ttl_seconds is None else max(1, round(self.cache_ttl_seconds * 1000))

    @property
    def stream_time_max_step_ms(self) -> int | None:
        """How far one trace may move stream time, ms; None: any distance."""
        step = self.stream_time_max_step_seconds
        return None if step is None else max(1, round(step * 1000))


class ModelSettings(BaseModel):
    """The embedding model."""

    embedder: Literal["auto", "openvino", "sentence-transformers", "http", "none"] = Field(
        "auto",
        description="auto is openvino if the model is exported, otherwise sentence-transformers; http is a service "
        "(docs/models.md); none is novelty 0.5",
    )
    embedder_url: Annotated[str, AfterValidator(check_embedder_url)] | None = Field(
        None, description="URL of the service, with OpenAI's /v1/embeddings"
    )
    embedder_token_file: FilePath | None = Field(None, description="the service's token file; re-read when it changes")
    model: str | None = Field(
        None,
        description="multilingual, a model's directory, its hub name, or the service's name for it (default: "
        "all-MiniLM-L6-v2; docs/models.md)",
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="exported model's number format (docs/settings.md)")
    embed_text: Literal["whole", "objective"] = Field(
        "whole", description="embed the text, or the objective and the text in equal parts (docs/tuning.md)"
    )
    max_tokens: int = Field(
        256,
        ge=8,
        le=8192,
        description="most tokens of a text that are embedded; with KP_EMBEDDER=http, how many the service reads",
    )
    embed_threads: int = Field(0, ge=0, le=256, description="threads of the embedder; 0: one per core")
    embed_in_flight: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = Field(
        "auto",
        description="most texts embedded at once; auto: 2, or 1 where two would exceed KP_LATENCY_BUDGET_SECONDS; "
        "with KP_EMBEDDER=http, requests at once (auto: 4)",
    )
    embed_remembered: int = Field(
        1024, ge=0, le=1_000_000, description="recent embeddings kept for texts that the model reads alike"
    )

    @field_validator("embed_in_flight", mode="wrap")
    @classmethod
    def _auto_or_number(cls, value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(value)
        except ValidationError:  # it has a line for each half of the type
            raise ValueError("give auto, or a number from 1 to 64") from None

    @model_validator(mode="after")
    def _check_service(self) -> Self:
        if self.embedder != "http":
            return self
        if self.embedder_url is None or self.model is None:
            raise ValueError(
                "KP_EMBEDDER=http needs KP_EMBEDDER_URL, and KP_MODEL with the service's name of the model "
                "(docs/models.md)"
            )
        if len(self.model) > 512:
            raise ValueError("KP_MODEL: the service's name of the model has more than 512 characters; give it a name")
        if self.precision != "fp32":
            raise ValueError(
                f"KP_PRECISION={self.precision} is for exported models: with KP_EMBEDDER=http the service chooses its "
                "precision; leave it out"
            )
        return self

    @property
    def embed_requests(self) -> int:
        """Requests to the embedding service at once."""
        return 4 if self.embed_in_flight == "auto" else self.embed_in_flight

    @property
    def most_in_flight(self) -> int:
        """Most texts embedded at once. 2 for auto: more side by side were not faster on two cores."""
        return 2 if self.embed_in_flight == "auto" else self.embed_in_flight


class LimitSettings(BaseModel):
    """Limits of size, memory and time."""

    max_message_bytes: int = Field(1_048_576, ge=1024, description="larger records become dead letters")
    max_batch_bytes: int = Field(
        67_108_864,
        ge=1_048_576,
        description="largest unpacked batch; a larger one becomes one dead letter (docs/publishing.md)",
    )
    memory_budget_bytes: int = Field(
        100_663_296,
        ge=16_777_216,
        description="memory for uncommitted records and unpacked batches, over all partitions",
    )
    max_steps: int = Field(10_000, ge=1, description="traces with more steps become dead letters")
    max_depth: int = Field(64, ge=8, le=256, description="documents with deeper nesting become dead letters")
    strict_context: bool = Field(False, description="reject the former @context https://knowledgepulse.dev/schema/v1")
    dead_letter_breaker_share: float = Field(
        0.0, ge=0, le=1, description="stop when more than this share of the last records are dead letters; 0: never"
    )
    dead_letter_breaker_window: int = Field(1000, ge=10, description="records that the share counts")
    latency_budget_seconds: float = Field(0.1, gt=0, description="budget of one evaluation; slower ones are counted")
    stuck_seconds: float = Field(
        60.0,
        gt=0,
        description="/healthz returns 503 when an embedding takes longer; with KP_EMBEDDER=http, the time limit of a "
        "request",
    )
    shutdown_timeout_seconds: float = Field(20.0, gt=0, description="longest drain on SIGTERM before the process exits")

    @property
    def limits(self) -> Limits:
        """Limits of the parser."""
        return Limits(self.max_message_bytes, self.max_steps, self.max_depth, self.strict_context)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.max_batch_bytes < self.max_message_bytes + BATCH_OVERHEAD + RECORD_OVERHEAD:
            raise ValueError(
                f"KP_MAX_BATCH_BYTES={self.max_batch_bytes} is too small for a record of "
                f"KP_MAX_MESSAGE_BYTES={self.max_message_bytes}; raise it"
            )
        return self


class HttpSettings(BaseModel):
    """The port, the status page, logs and spans."""

    http_host: str = Field("0.0.0.0", description="address of /metrics, /healthz, /readyz and the status page")  # noqa: S104 probes
    http_port: int = Field(9108, ge=0, le=65535, description="HTTP port; 0: a free one")
    status_page: bool = Field(False, description="serve the status page at / (docs/security.md)")
    status_hosts: str = Field("", description="more host names of the status page, separated by commas; others get 421")
    status_texts: bool = Field(False, description="show objectives and dead letters' messages, which quote the record")
    tracing: bool = Field(
        False, description="export OpenTelemetry spans, configured by OTEL_* variables (docs/tracing-and-logs.md)"
    )
    log_format: Literal["text", "json"] = Field("text", description="log format")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest severity logged")


class ContributeSettings(KafkaSettings):
    """`kp-worker contribute`."""

    registry_url: Annotated[str, AfterValidator(check_registry_url)] | None = Field(
        None, description="base URL of the registry: https, or http to loopback"
    )
    registry_key: SecretStr | None = Field(None, description="key for the registry; better in a file")
    registry_key_file: FilePath | None = Field(None, description="file with the key; read again when it changes")
    contribute_visibility: Annotated[str, AfterValidator(check_choices("network", "org", "private"))] = Field(
        "network", description="metadata.visibility that is posted; several with commas"
    )
    contribute_privacy: Annotated[str, AfterValidator(check_choices("aggregated", "federated", "private"))] = Field(
        "aggregated", description="metadata.privacy_level that is posted; several with commas"
    )
    contribute_screen: Literal["off", "hidden"] = Field(
        "hidden", description="refuse nothing, or hidden text (docs/redaction.md)"
    )
    contribute_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="most POSTs a minute per process; unset: the registry's limit"
    )
    contribute_timeout_seconds: float = Field(30.0, ge=0.1, le=300, description="time limit of a registry request")
    contributed_topic: TopicName | None = Field(
        None, description="compacted topic of receipts (default: <accepted>.contributed)"
    )
    refused_topic: TopicName | None = Field(None, description="topic of refused traces (default: <accepted>.refused)")

    @property
    def contributed(self) -> str:
        """Name of the topic of the receipts."""
        return self.contributed_topic or f"{self.accepted_topic}.contributed"

    @property
    def refused(self) -> str:
        """Name of the topic for traces that the registry refuses."""
        return self.refused_topic or f"{self.accepted_topic}.refused"

    @property
    def contribute_group(self) -> str:
        """Consumer group of `contribute`; also the prefix of its transactional ids."""
        return f"{self.group_id}-contribute"


class AssembleSettings(KafkaSettings):
    """`kp-worker assemble`."""

    spans_topic: Annotated[str, AfterValidator(check_topics)] = Field(
        "otlp_spans", min_length=1, description="topics of spans or logs; several with commas (docs/opentelemetry.md)"
    )
    spans_keyed: bool = Field(False, description="KP_SPANS_TOPIC is one topic that keeps each trace on one partition")
    assemble_confidence: AssembleRule | None = Field(
        None,
        description="outcome.confidence: 0 to 1, or an attribute (docs/opentelemetry.md); `assemble` needs "
        "this and the next three",
    )
    assemble_domain: AssembleRule | None = Field(None, description="metadata.task_domain, or an attribute")
    assemble_visibility: AssembleRule | None = Field(
        None, description="metadata.visibility: network, org, private or an attribute"
    )
    assemble_privacy: AssembleRule | None = Field(
        None, description="metadata.privacy_level: aggregated, federated, private or an attribute"
    )
    assemble_agent: AssembleRule = Field(
        "name", description="agent id: `name`, `service/name`, an attribute, or a text for runs without a name"
    )
    assemble_key: Literal["agent", "trace"] = Field(
        "agent", description="a trace's key is the agent's id, or the OpenTelemetry trace's"
    )
    assemble_grace_seconds: float = Field(
        60.0, ge=0, le=86_400, allow_inf_nan=False, description="wait for more spans after a run's root has ended"
    )
    assemble_gap_seconds: float = Field(
        900.0, gt=0, le=604_800, allow_inf_nan=False, description="wait for a run's next span before its root has ended"
    )
    assemble_memory_seconds: float = Field(
        86_400.0,
        ge=0,
        le=2_592_000,
        allow_inf_nan=False,
        description="how long closed runs are remembered, so that late spans make no second trace",
    )

    @property
    def span_topics(self) -> list[str]:
        """Topics with spans or logs, which `assemble` reads."""
        return self.spans_topic.split(",")

    @property
    def assembles(self) -> bool:
        """Whether a setting that `assemble` needs is given."""
        return bool(given(self) & {f"assemble_{name}" for name in ("confidence", "domain", "visibility", "privacy")})

    @property
    def assemble_group(self) -> str:
        """Consumer group of `assemble`; also the prefix of its transactional ids."""
        return f"{self.group_id}-assemble"

    @property
    def assemble_spans(self) -> str:
        """Name of the topic with the spans by trace id."""
        return f"{self.assemble_group}-spans"

    @property
    def assemble_state(self) -> str:
        """Name of the compacted topic with the open runs, and the ids of the closed ones."""
        return f"{self.assemble_group}-state"

    @model_validator(mode="after")
    def _check_spans(self) -> Self:
        if self.spans_keyed and len(self.span_topics) > 1:
            raise ValueError(
                "KP_SPANS_KEYED=true needs a single KP_SPANS_TOPIC: in two topics the partitions of a trace may differ"
            )
        return self


SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "Kafka": KafkaSettings,
    "Scoring": ScoringSettings,
    "Model": ModelSettings,
    "Limits": LimitSettings,
    "HTTP, logs and spans": HttpSettings,
    "Contribute": ContributeSettings,
    "Assemble": AssembleSettings,
}
"""The sections by heading, in the order of docs/settings.md."""


class Settings(  # pydantic orders the fields from the last base to the first
    AssembleSettings, ContributeSettings, HttpSettings, LimitSettings, ModelSettings, ScoringSettings, KafkaSettings
):
    """All settings of the worker."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="after")
    def _check_sections_together(self) -> Self:
        check_security(given(self), self.security_protocol, self.sasl_mechanism)
        topics = list(self.topics.values())
        if len(set(topics)) != len(topics):
            raise ValueError(f"the topics must differ from each other, got {', '.join(topics)}")
        if len({*topics, self.contributed, self.refused}) != len(topics) + 2:
            raise ValueError(
                f"the topics of contribute, {self.contributed} and {self.refused}, must differ from each other and "
                "from all others"
            )
        others = {*topics, self.contributed, self.refused}
        if both := sorted({*self.span_topics, self.assemble_spans, self.assemble_state} & others):
            raise ValueError(f"the topics of assemble must differ from all others; {both[0]} is another one, too")
        if self.output_embedding and self.embedder == "none":
            raise ValueError("KP_OUTPUT_EMBEDDING=true needs an embedder; set KP_EMBEDDER to something other than none")
        return self

    @property
    def topics(self) -> Mapping[str, str]:
        """Names of the topics, by the variable that sets each: five, and with KP_VERDICT_KEY_FILE that of verdicts."""
        names = {
            "KP_SOURCE_TOPIC": self.source_topic,
            "KP_ACCEPTED_TOPIC": self.accepted_topic,
            "KP_REJECTED_TOPIC": self.rejected_topic,
            "KP_DEAD_LETTER_TOPIC": self.dead_letter_topic,
            "KP_CHANGELOG_TOPIC": self.changelog,
        }
        return names if self.verdict_key_file is None else names | {"KP_JUDGED_TOPIC": self.judged}


def describe(section: type[BaseModel] = Settings) -> list[tuple[str, str, str]]:
    """Return (variable, default, meaning) of every setting, in order: for --help and docs/settings.md."""
    rows = []
    for name in section.__annotations__ if section is not Settings else section.model_fields:
        info = section.model_fields[name]
        default = info.get_default(call_default_factory=True)
        text = default or "" if isinstance(default, str | None) else json.dumps(default).removesuffix(".0")
        rows.append((PREFIX + name.upper(), text, _allowed(info.annotation) + (info.description or "")))
    return rows


def _allowed(annotation: Any) -> str:
    choices = [item for item in (annotation, *get_args(annotation)) if get_origin(item) is Literal]
    return " | ".join(get_args(choices[0])) + ": " if choices and len(get_args(choices[0])) > 1 else ""
