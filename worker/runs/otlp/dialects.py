"""The dialects in which libraries write runs of agents into spans: a table, and lookups in it.

A dialect is a row: which spans speak it, and where they say what. Each library has its own, and many spans speak two.
So all rows that fit a span's scope are looked through in the table's order, and the first that says something counts.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from worker.runs.fields import find_field
from worker.runs.otlp.spans import Span
from worker.runs.otlp.values import REDACTED, loaded, unflattened

MAX_NAME: Final = 100
"""Maximum length of a scope, an attribute or an event to be reported as not read."""

Kind = Literal["model", "tool", "agent", "chain", "other"]


# Places of values


class Place(NamedTuple):
    """Where a value is: in an attribute, or in all whose names begin with `name`."""

    name: str
    of: Callable[[Mapping[str, Any]], Any]  # returns the value, given a span's attributes; None if there is none
    is_flat: bool = False


Groups: TypeAlias = tuple[tuple[Place, ...], ...]
"""Of each group, the first place with a value counts."""

Source: TypeAlias = str | Place | Groups
"""A name stands for an attribute; `""` for none."""


def _attribute(name: str) -> Place:
    return Place(name, lambda attributes: None if (value := attributes.get(name)) in (None, "", REDACTED) else value)


def in_json(name: str, *path: str | int) -> Place:
    """A field in the JSON that an attribute holds: `in_json("a", "b", 0)` is the first item of b."""
    keys = tuple(map(str, path))

    def of(attributes: Mapping[str, Any]) -> Any:
        inner = None if attributes.get(name) is None else find_field(loaded(attributes[name]), keys)
        return None if inner is None or inner[1] == "" else inner[1]

    return Place(name, of)


def regex(name: str, pattern: str) -> Place:
    """The first group of a regular expression that matches somewhere in an attribute."""
    search = re.compile(pattern).search

    def of(attributes: Mapping[str, Any]) -> Any:
        match = search(value) if isinstance(value := attributes.get(name), str) else None
        return match and match[1]

    return Place(name, of)


def answer(name: str) -> Place:
    """An attribute that is the answer itself, even if it is JSON: an object that the model was asked for."""
    of = _attribute(name).of
    return Place(name, lambda attributes: (value := of(attributes)) and {"role": "assistant", "content": value})


def below(name: str) -> Place:
    """All attributes whose names begin so, as a list of objects: OpenInference and OpenLLMetry flatten messages."""
    return Place(name, lambda attributes: unflattened(attributes, name), is_flat=True)


def joined_calls(name: str, tools: str, ids: str) -> Place:
    """The calls of an answer by OpenLIT until 1.35: arguments, names and ids, each joined by commas."""

    def of(attributes: Mapping[str, Any]) -> Any:
        names, call_ids = (str(attributes.get(key, "")).split(", ") for key in (tools, ids))
        given = loaded(f"[{attributes[name]}]") if name in attributes else None
        if not isinstance(given, list) or not len(given) == len(names) == len(call_ids):
            return None
        calls = zip(names, call_ids, given, strict=True)
        return [{"name": tool, "id": call_id, "arguments": arguments} for tool, call_id, arguments in calls]

    return Place(name, of)


def first(*places: str | Place) -> Groups:
    """The first of these places that has a value."""
    return (tuple(_attribute(each) if isinstance(each, str) else each for each in places),)


def each(*sources: Source) -> Groups:
    """The values of all these, one after the other."""
    return tuple(group for source in sources for group in _groups_in(source))


def _groups_in(source: Source) -> Groups:
    if isinstance(source, str | Place):
        return first(source) if source else ()
    return source


@dataclass(frozen=True, kw_only=True, eq=False)
class Dialect:
    """One row of the table."""

    name: str  # in metrics
    scopes: tuple[str, ...] = ()
    """The scopes whose spans may speak it: whole names, or beginnings that end with a dot or a slash. None: all."""
    kind: str = ""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """The attribute that says what a span is, and what its values mean; `*x` is any that ends with x, `x*` begins."""
    spans: Mapping[str, Kind] = field(default_factory=dict)  # the same by a span's name, whatever its attributes say
    signs: Mapping[str, Kind] = field(default_factory=dict)  # by attributes of one kind alone; `x.` is any below x

    input: Source = ""  # the messages for a model, the task of an agent, the arguments of a tool
    output: Source = ""  # the answer of a model or an agent, the result of a tool
    in_events: bool = False  # the messages are in events of the span, and in log records
    agent: Source = ""
    tool: Source = ""
    call_id: Source = ""
    arguments: Source = ""
    result: Source = ""
    """Of a tool, if it is not in `input` and `output`."""
    failed: Source = ""  # true, "true", "error", "ERROR" or "failure" if a span failed, besides its status
    failed_by_exception: bool = False  # a span with an exception failed
    task: Source = ""
    answer: Source = ""
    """The user's own words, and the final answer, if the messages of the model have prompts around them."""
    prompt: re.Pattern[str] | None = None  # finds the user's own words in the prompt made of them
    delegate: Source = ""  # if a tool is another agent, that agent's name
    workflow: Source = ""  # what an agent is part of; its name counts if no agent has a name, or several have
    agent_id: Source = ""  # it counts if there is no name: in several libraries each run has another one
    error: Source = ""  # why a span failed, besides its status and its exception
    form: Literal["", "google", "fields", "short", "own ids", "blocks", "whole"] = ""
    """What is peculiar to its messages: results are wrapped, and ids of calls are positions (content.of_google), a text
    has fields (content.without_fields), earlier messages are abbreviated (content.without_short), calls and their
    results have different ids (content.with_calls), the choices are blocks of one message, or what its spans say
    is the whole: a model's spans below them do not count."""

    repeats: tuple[str, ...] = ()  # beginnings of attributes that repeat what others say

    @cached_property
    def places(self) -> Mapping[str, Groups]:
        """The places of each field that has any."""
        return {name: groups for name in _SOURCES if (groups := _groups_in(getattr(self, name)))}

    @cached_property
    def messages(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The attributes that have its messages as JSON, and the beginnings of those into which they are flattened."""
        both = [place for name in ("input", "output") for group in self.places.get(name, ()) for place in group]
        return tuple(each.name for each in both if not each.is_flat), tuple(each.name for each in both if each.is_flat)

    def is_spoken(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether the attributes may hold messages. Events are not looked for."""
        names, prefixes = self.messages
        for name in names:
            if name in attributes:
                return True
        return self.in_events or (bool(prefixes) and any(key.startswith(prefixes) for key in attributes))

    def values(self, span: Span, name: str) -> list[Any]:
        """Return the values of a field."""
        return _found(span, self.places.get(name, ()))


_SOURCES: Final = (
    "input", "output", "agent", "tool", "call_id", "arguments", "result", "failed", "task", "answer", "delegate",
    "workflow", "agent_id", "error",
)  # fmt: skip


_CAPTURE: Final = (
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only, and "
    "OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental"
)

_TRACELOOP: Final = (
    "agno alephalpha anthropic bedrock cohere crewai google_generativeai groq haystack langchain llamaindex mcp "
    "mistralai ollama openai openai_agents replicate sagemaker together transformers vertexai watsonx writer"
)
"""The libraries that Traceloop instruments. OpenTelemetry and web clients use the same prefix for other scopes."""

_HINTS: Final = {
    # a scope, or what scopes begin with: what captures content
    **{f"opentelemetry.instrumentation.{name}": _CAPTURE for name in ("openai_v2", "genai", "google_genai")},
    "opentelemetry.util.genai": _CAPTURE,
    "opentelemetry.instrumentation.botocore": "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true",
    **{f"opentelemetry.instrumentation.{name}": "TRACELOOP_TRACE_CONTENT=true" for name in _TRACELOOP.split()},
    "traceloop": "TRACELOOP_TRACE_CONTENT=true",
    "agent_framework": "ENABLE_SENSITIVE_DATA=true",
    "ai": "experimental_telemetry without recordInputs: false and recordOutputs: false",
    "autogen-core": "its own spans hold no texts: add openinference-instrumentation-autogen-agentchat",
    "com.anthropic.sdk.python": "ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE=content",
    "gcp.vertex.agent": "neither ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS=false nor "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=false",
    "haystack": "HAYSTACK_CONTENT_TRACING_ENABLED=true",
    "langsmith": "neither LANGSMITH_HIDE_INPUTS nor LANGSMITH_HIDE_OUTPUTS",
    "openinference": "neither OPENINFERENCE_HIDE_INPUTS nor OPENINFERENCE_HIDE_OUTPUTS",
    "openlit": "OPENLIT_CAPTURE_MESSAGE_CONTENT=true",
    "pydantic-ai": "InstrumentationSettings(include_content=True)",
    "semantic_kernel": "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE=true, and otlp_logs in "
    "KP_SPANS_TOPIC",
}


def hint_of(scope: str) -> str:
    """Return the setting that captures content in the spans of a scope, "" if it is not known."""
    name = scope if len(scope) <= MAX_NAME else ""
    while name and name not in _HINTS:
        name = name.rpartition(".")[0]
    return _HINTS.get(name, "")


def _of(**kinds: str | tuple[str, ...]) -> Mapping[str, Kind]:
    """Return the kind of each value, given the values of each kind."""
    return {
        value: kind  # type: ignore[misc]
        for kind, values in kinds.items()
        for value in ([values] if isinstance(values, str) else values)
    }


DIALECTS: Final = (
    # What single libraries write, before what many share
    Dialect(name="anthropic_sdk", scopes=("com.anthropic.sdk.python",)),
    Dialect(name="gen_ai_events",
        scopes=("opentelemetry.instrumentation.anthropic", "opentelemetry.instrumentation.bedrock"), form="blocks"),
    Dialect(name="google",  # ADK, and OpenTelemetry's instrumentation of google-genai
        scopes=("gcp.vertex.agent", "opentelemetry.instrumentation.google_genai"),
        input="gcp.vertex.agent.llm_request", output="gcp.vertex.agent.llm_response",
        arguments=first("gen_ai.tool.call.arguments", "gcp.vertex.agent.tool_call_args"),
        result=first("gen_ai.tool.call.result", "gcp.vertex.agent.tool_response"), form="google"),
    Dialect(name="google",  # of several calls, ADK's span has the last one; flattened messages of others lie among it
        scopes=("gcp.vertex.agent", "openinference.instrumentation.google_adk"),
        spans=_of(model="call_llm", chain="invocation", other=("execute_tool (merged)", "execute_tool (merged tools)")),
        input="input.value", output="output.value", form="google"),
    Dialect(name="google",
        scopes=("openinference.instrumentation.google_genai", "openinference.instrumentation.vertexai",
                "opentelemetry.instrumentation.google_generativeai", "opentelemetry.instrumentation.vertexai"),
        form="google"),
    Dialect(name="openllmetry", scopes=("opentelemetry.instrumentation.openai.",), form="own ids"),
    Dialect(name="instructor", scopes=("openinference.instrumentation.instructor",),
        spans=_of(model="instructor.*", other="*handle_response_model"), input=below("llm.input_messages."),
        output=answer("output.value"), form="whole"),
    Dialect(name="vercel_ai", scopes=("ai",), kind="ai.operationId",
        kinds=_of(
            model=("ai.generatetext.dogenerate", "ai.streamtext.dostream", "ai.generateobject.dogenerate",
                   "ai.streamobject.dostream"),
            agent=("ai.generatetext", "ai.streamtext", "ai.generateobject", "ai.streamobject"), tool="ai.toolcall",
            other="*"),
        input=first("ai.prompt.messages", "ai.prompt"),
        output=each("ai.response.reasoning",
                    first("ai.response.text", "ai.result.text", answer("ai.response.object"),
                          answer("ai.result.object")),
                    first("ai.response.toolCalls", "ai.result.toolCalls")),
        agent="ai.telemetry.functionId", tool="ai.toolCall.name", call_id="ai.toolCall.id",
        arguments="ai.toolCall.args", result="ai.toolCall.result"),
    Dialect(name="langfuse", kind="langfuse.observation.type",
        kinds=_of(model="generation", tool="tool", agent="agent", chain="chain", other="*"),
        input="langfuse.observation.input", output="langfuse.observation.output"),
    Dialect(name="agentops", scopes=("agentops", "agentops."), spans=_of(other="tool_call.*"),
        kind="agentops.span.kind",
        kinds=_of(tool="tool", agent="agent", other="*"), input=first("agentops.task.input", "agentops.entity.input"),
        output=first("agentops.task.output", "agentops.entity.output"), agent="operation.name", tool="operation.name",
        arguments="agentops.tool.input", result="agentops.tool.output"),
    Dialect(name="mlflow", scopes=("mlflow.",),
        spans=_of(other=("AgentRunner.run*", "Agent workflow")),  # the OpenAI Agents SDK
        agent=in_json("name"), tool=in_json("name")),  # pydantic-ai and DSPy
    Dialect(name="mlflow", kind="mlflow.spanType",
        kinds=_of(model=("chat_model", "llm"), tool="tool", agent="agent", chain="chain", other="*"),
        input="mlflow.spanInputs", output="mlflow.spanOutputs"),
    Dialect(name="haystack", scopes=("haystack",),
        spans=_of(model="haystack.agent.step.llm", tool="haystack.agent.step.tool", agent="haystack.agent.run",
                  chain="haystack.pipeline.run"),
        kind="haystack.component.type", kinds=_of(agent="agent", model="*generator", other="*"),
        input=first("haystack.agent.step.llm.input", "haystack.agent.input", "haystack.component.input"),
        output=first("haystack.agent.step.llm.output", "haystack.agent.output", "haystack.component.output"),
        agent="haystack.component.name", tool="haystack.tool.name", arguments="haystack.agent.step.tool.input",
        result="haystack.agent.step.tool.output", failed="haystack.tool.error", repeats=("haystack.pipeline.",)),
    Dialect(name="haystack", scopes=("openinference.instrumentation.haystack",),
        spans=_of(agent="Agent.run", other="Pipeline.run")),
    Dialect(name="litellm", scopes=("litellm",),
        spans=_of(model="raw_gen_ai_request"),  # says what each call was if they all have one span, which has the last
        input=first("gen_ai.input.messages", "llm.openai.messages"),
        output=each("gen_ai.output.messages", "llm.openai.choices", below("gen_ai.completion.")),
        error="error.message", form="whole", repeats=("llm.",)),
    Dialect(name="langsmith", scopes=("langsmith",),
        spans=_of(other=("Agent workflow", "Span")),  # the OpenAI Agents SDK
        kind="langsmith.span.kind", kinds=_of(model="llm", tool="tool", chain="chain", other="*"),
        input="gen_ai.prompt", output="gen_ai.completion", failed_by_exception=True),
    Dialect(name="mastra", scopes=("@mastra/",), kind="mastra.span.type",
        kinds=_of(model=("model_generation", "model_step", "llm_generation"), agent=("agent_run", "workflow_run"),
            tool=("tool_call", "mcp_tool_call", "provider_tool_call"), other="*"),
        input=first("gen_ai.input.messages", "gen_ai.prompt", "mastra.model_step.input", "mastra.agent_run.input"),
        output=first("gen_ai.output.messages", "gen_ai.completion", "mastra.model_step.output",
                     "mastra.agent_run.output"),
        arguments=first("gen_ai.tool.call.arguments", "gen_ai.tool.input"),
        result=first("gen_ai.tool.call.result", "gen_ai.tool.output"), agent="agent.id", error="error.message",
        form="short"),
    Dialect(name="logfire",  # the OpenAI Agents SDK
        scopes=("logfire.openai_agents",), spans=_of(agent="Agent run: {name!r}", tool="Function: {name}"),
        input="raw_input", output=in_json("response", "output"),
        agent=regex("logfire.msg", r"Agent\srun:\s'([^']*)'"),  # the attribute `name` may be scrubbed
        tool="name", arguments="input", result="output",
        error=first(in_json("error", "data", "error"), in_json("error", "message"))),
    Dialect(name="logfire", scopes=("logfire.",), input=first("gen_ai.input.messages", "request_data"),
        output=first("gen_ai.output.messages", "response_data")),
    Dialect(name="openlit", scopes=("openlit.instrumentation.langgraph",),
        spans=_of(agent="invoke_workflow *"),  # one that failed says no more
        agent="gen_ai.workflow.name"),
    Dialect(name="openlit", scopes=("openlit.",), error="gen_ai.framework.error.message"),
    Dialect(name="openlit", scopes=("openlit",), signs=_of(other="gen_ai.output.messages")),
    Dialect(name="crewai", scopes=("openinference.instrumentation.crewai", "opentelemetry.instrumentation.crewai.",
            "openlit.instrumentation.crewai"),
        agent=first("graph.node.id", "crewai.agent.role"),
        task=first(in_json("crew_tasks", 0, "description"), in_json("crewai.crew.tasks", 0, "description"),
                   in_json("output.value", "description")),
        answer=first(in_json("output.value", "raw"), "crewai.crew.result"),
        prompt=re.compile(r"Current Task: (.*?)\n\nThis is the expected criteria", re.DOTALL),
        delegate=in_json("input.value", "coworker")),
    Dialect(name="agno", scopes=("opentelemetry.instrumentation.agno",),
        failed=regex("traceloop.entity.output", r"\Astatus='(failure)'")),
    Dialect(name="autogen",
        scopes=("openinference.instrumentation.autogen_agentchat", "openinference.instrumentation.autogen"),
        input=below("llm.input_messages."), output="output.value", agent="graph.node.id"),
    Dialect(name="smolagents",
        scopes=("openinference.instrumentation.smolagents", "opentelemetry.instrumentation.genai.smolagents"),
        task=first("smolagents.task", in_json("input.value", "task")),
        prompt=re.compile(r"\ANew task:\n(.*)", re.DOTALL)),
    Dialect(name="llama_index", scopes=("openinference.instrumentation.llama_index",),
        spans=_of(other="*._prepare_chat_with_tools"), agent=regex("input.value", "current_agent_name='([^']*)'"),
        arguments=first(in_json("input.value", "kwargs"), "input.value"),
        result=first(in_json("output.value", "raw_output"), "output.value"),
        failed=in_json("output.value", "is_error")),
    Dialect(name="llama_index", scopes=("opentelemetry.instrumentation.llamaindex",), kind="tool.name",
        kinds=_of(tool="*"), tool="tool.name", call_id=in_json("traceloop.entity.output", "tool_id"),
        arguments="tool.arguments", result=in_json("traceloop.entity.output", "tool_output", "raw_output"),
        failed=in_json("traceloop.entity.output", "tool_output", "is_error")),
    Dialect(name="llama_index", scopes=("opentelemetry.instrumentation.llamaindex",),
        spans=_of(agent="run.task", chain=("AgentWorkflow.task", "*Agent.task")),
        agent=in_json("traceloop.entity.output", "current_agent_name"),
        input=in_json("traceloop.entity.input", "messages"), output=in_json("traceloop.entity.output", "message")),
    Dialect(name="dspy",  # all its prompts are made of fields, and so are the answers
        scopes=("openinference.instrumentation.dspy", "opentelemetry.instrumentation.genai.dspy"),
        spans=_of(other="finish.__call__"), answer=in_json("output.value", "answer"), form="fields"),
    Dialect(name="langgraph",  # an AGENT is a node of the graph, one for each turn; the run is the CHAIN above
        scopes=("openinference.instrumentation.langchain",), kind="openinference.span.kind",
        kinds=_of(model="llm", tool="tool", chain=("agent", "chain"))),
    # before what the Collector's genainormalizer makes of it
    Dialect(name="openinference", scopes=("openinference.",), kind="openinference.span.kind",
        kinds=_of(chain="chain"), input=below("llm.input_messages."), output=below("llm.output_messages.")),
    # The conventions of OpenTelemetry, and those before and beside them
    Dialect(name="gen_ai", kind="gen_ai.operation.name",
        kinds=_of(model=("chat", "chat.completions", "generate_content", "text_completion", "text.completions"),
            tool="execute_tool", agent=("invoke_agent", "invoke_workflow"),
            other=("create_agent", "embeddings", "plan", "retrieval")),
        input="gen_ai.input.messages", output="gen_ai.output.messages", agent="gen_ai.agent.name",
        agent_id="gen_ai.agent.id", workflow="gen_ai.workflow.name", tool="gen_ai.tool.name",
        call_id="gen_ai.tool.call.id", arguments="gen_ai.tool.call.arguments", result="gen_ai.tool.call.result"),
    Dialect(name="openinference", kind="openinference.span.kind",
        kinds=_of(model="llm", tool="tool", agent="agent", chain="chain",
            other=("retriever", "embedding", "reranker", "guardrail", "evaluator", "prompt", "unknown")),
        input=below("llm.input_messages."), output=below("llm.output_messages."), agent="agent.name", tool="tool.name",
        call_id=first("tool_call.id", "tool.id")),
    Dialect(name="openllmetry", kind="traceloop.span.kind",
        kinds=_of(tool="tool", agent=("workflow", "agent"), other=("task", "unknown")),
        signs=_of(tool="gen_ai.tool.name",
            model=("llm.request.type", "gen_ai.request.model", "gen_ai.output.messages", "gen_ai.completion.",
                   "gen_ai.prompt.", "llm.output_messages.")),
        input=below("gen_ai.prompt."), output=below("gen_ai.completion."),
        agent=each("agent_name", "traceloop.association.properties.lc_agent_name"),
        workflow=each("traceloop.workflow.name", "traceloop.entity.name"), tool="traceloop.entity.name"),
    Dialect(name="openlit", input="gen_ai.prompt",
        output=each("gen_ai.completion", joined_calls("gen_ai.tool.args", "gen_ai.tool.name", "gen_ai.tool.call.id"))),
    Dialect(name="gen_ai_events", in_events=True),
    Dialect(name="openllmetry", input="traceloop.entity.input", output="traceloop.entity.output"),
    Dialect(name="pydantic_ai", input="pydantic_ai.all_messages", arguments="tool_arguments", result="tool_response"),
    Dialect(name="pydantic_ai", output="final_result", agent=regex("logfire.msg", r"\A(.*)\srun\Z")),
    Dialect(name="openinference_raw", input="input.value", output="output.value",
        arguments=first("input.value", "tool.parameters")),
)  # fmt: skip

CONVENTIONS: Final = tuple(dict.fromkeys(row.name for row in DIALECTS))
"""The names of all conventions."""


def dialects_of(scope: str) -> tuple[Dialect, ...]:
    """Return the rows that fit a scope."""
    return _dialects_of(scope[:MAX_NAME])  # what anyone may send is not kept whole


@lru_cache(maxsize=1024)
def _dialects_of(scope: str) -> tuple[Dialect, ...]:
    def is_in(known: str) -> bool:
        return scope.startswith(known) if known.endswith((".", "/")) else scope == known

    return tuple(row for row in DIALECTS if not row.scopes or any(map(is_in, row.scopes)))


def kind_of(span: Span) -> Kind:
    """Return the kind of a span."""
    attributes = span.attributes
    rows = dialects_of(span.scope)
    for row in rows:
        if row.spans and (kind := _meant(row.spans, span.name)) is not None:
            return kind
        value = attributes.get(row.kind) if row.kind else None
        kind = _meant(row.kinds, value.strip('"').lower()) if isinstance(value, str) else None
        if kind == "agent" and attributes.get("traceloop.span.kind") == "task":  # the Collector's genainormalizer errs
            continue
        if kind is not None:
            return kind
    for row in rows:
        for sign, kind in row.signs.items() if row.signs else ():
            if sign in attributes or (sign.endswith(".") and any(key.startswith(sign) for key in attributes)):
                return kind
    return "other"


def _meant(kinds: Mapping[str, Kind], value: str) -> Kind | None:
    if value in kinds:
        return kinds[value]
    return next((kind for part, kind in kinds.items() if (part[:1] == "*" and value.endswith(part[1:]))
                 or (part[-1:] == "*" and value.startswith(part[:-1]))), None)  # fmt: skip


def values(span: Span, name: str) -> list[Any]:
    """Return the values of a field, row by row."""
    return _found(span, _groups(dialects_of(span.scope), name))


@cache  # by what rows a scope has, of which there are few: scopes are what anyone may send
def ranked(rows: tuple[Dialect, ...], name: str) -> tuple[tuple[int, Dialect], ...]:
    """Return the rows that have a field, with their positions in the table."""
    return tuple((rank, row) for rank, row in enumerate(DIALECTS) if row in rows and name in row.places)


@cache
def attributes_of(rows: tuple[Dialect, ...], name: str) -> tuple[str, ...]:
    """Return the attributes from which these rows take a field."""
    return tuple({place.name for group in _groups(rows, name) for place in group})


@cache
def _groups(rows: tuple[Dialect, ...], name: str) -> Groups:
    return tuple(group for _, row in ranked(rows, name) for group in row.places[name])


def _found(span: Span, groups: Groups) -> list[Any]:
    attributes, values = span.attributes, []
    for group in groups:
        for place in group:
            value = place.of(attributes)
            if value is not None:
                values.append(value)
                break
    return values


def first_text(span: Span, name: str) -> str:
    """Return the first text of a field, "" if there is none."""
    return next((each for each in values(span, name) if isinstance(each, str) and each.strip()), "")


def spoken(span: Span) -> str:
    """Return the dialect of a model's span without content, "" if it cannot be told."""
    for row in dialects_of(span.scope):
        if (row.scopes and not row.places and not row.form) or (row.kind and row.kind in span.attributes):
            return row.name
    return next((row.name for row in dialects_of(span.scope) if not row.signs.keys().isdisjoint(span.attributes)), "")


def is_read(scope: str, key: str) -> bool:
    """Return whether an attribute of a scope's spans is read, or repeats others."""
    keys, prefixes = _read_by(scope[:MAX_NAME])
    return key in keys or key.startswith(prefixes)


_CONTENT: Final = re.compile(
    r"answers?|arg(?:ument)?s|body|chat|completions?|contents?|conversation|history|inputs?|messages?|observation|"
    r"outputs?|prompts?|query|question|reasoning|repl(?:y|ies)|request|response|results?|task|text|thinking|thoughts?"
)
"""Words in the names of attributes with content."""

_ABOUT: Final = re.compile(
    r"address|association|choice|code|cost|count|definitions?|description|formats?|hash|headers?|ids?|invocation|kind|"
    r"key|label|language|length|level|limit|metadata|method|mime|mode|model|msg|names?|parameters|parent|path|"
    r"properties|provider|reasons?|role|schema|sequences|settings|size|status|tags?|temperature|template|time|"
    r"timestamp|tokens?|types?|ur[il]|usage|version"
)
"""Words in the names of attributes about content, such as its size."""

_ELSEWHERE: Final = (
    "aws.", "browser.", "client.", "cloud.", "cloudevents.", "code.", "db.", "deployment.", "error.", "exception.",
    "faas.", "graphql.", "http.", "k8s.", "log.", "messaging.", "net.", "network.", "otel.", "process.", "rpc.",
    "server.", "session.", "telemetry.", "thread.", "url.", "user.", "user_agent.",
)  # fmt: skip
"""Prefixes of attributes that OpenTelemetry's conventions use for something other than models."""

_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def is_missed(scope: str, key: str) -> bool:
    """Return whether an attribute's name suggests content and no row of the scope reads it."""
    return len(key) <= MAX_NAME and len(scope) <= MAX_NAME and _is_missed(scope, key)


@lru_cache(maxsize=4096)
def _is_missed(scope: str, key: str) -> bool:
    if key.startswith(_ELSEWHERE):
        return False
    words = [word.lower() for word in _WORD.findall(key)]
    holds, about = any(map(_CONTENT.fullmatch, words)), any(map(_ABOUT.fullmatch, words))
    return holds and not about and not is_read(scope, key)


@lru_cache(maxsize=1024)
def _read_by(scope: str) -> tuple[frozenset[str], tuple[str, ...]]:
    rows = dialects_of(scope)
    places = [place for row in rows for groups in row.places.values() for group in groups for place in group]
    keys = {place.name for place in places if not place.is_flat} | {row.kind for row in rows}
    flat = [place.name for place in places if place.is_flat]
    signs = [sign for row in rows for sign in row.signs]
    prefixes = (*flat, *(each for each in signs if each.endswith(".")), *(each for row in rows for each in row.repeats))
    return frozenset(keys | set(signs)) - {""}, prefixes


_GENERATED: Final = re.compile(
    r"(?<![0-9a-z])(?:"
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # a UUID
    r"|(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,}|[0-9]{9,}"  # hex, a counter, an address in memory
    r"|[0-9a-hjkmnp-tv-z]{26}"  # a ULID
    r"|(?:run|thread|session|trace|conv)[-_](?=[a-z]*[0-9])[0-9a-z]{8,}"
    r")(?![0-9a-z])",
    re.IGNORECASE,
)
"""Parts of names that are generated for each run or process."""

_METHOD: Final = re.compile(
    r"\.(?:a?(?:run|call|invoke|stream|kickoff)(?:_\w+)?|__call__|_execute_core|on_messages(?:_stream)?|forward|workflow"
    r"|agent)$"
)
"""The method of an agent or a tool at the end of a span's name."""


def stable(name: str) -> str:
    """Return a name without its generated parts, "" if it was scrubbed."""
    return _stable(name) if len(name) <= MAX_NAME else _stable.__wrapped__(name)


@lru_cache(maxsize=4096)  # an agent's runs repeat its name, in each of their spans
def _stable(name: str) -> str:
    if name.startswith("[Scrubbed due to "):  # by Logfire: it looks like a secret, such as one with `secretary`
        return ""
    if _GENERATED.search(name) is None:
        return name if name.strip() else ""
    return _GENERATED.sub("", name).strip(" -_:/.#()[]{}")


def said_name(spans: Iterable[Span], field: str = "agent") -> str:
    """Return the agent's name in the attributes of spans, by the first row of the table that has one; "" for none."""
    best, name = len(DIALECTS), ""
    for span in spans:
        rows = dialects_of(span.scope)
        if span.attributes.keys().isdisjoint(attributes_of(rows, field)):
            continue
        for rank, row in ranked(rows, field):
            if rank >= best:
                break
            for value in row.values(span, field):
                if isinstance(value, str) and (own := stable(value)):
                    best, name = rank, own
                    break
    return name


def span_name(span: Span) -> str:
    """Return the agent's name in the name of its span, "" if all agents have the same."""
    for row in dialects_of(span.scope):
        if (row.spans and span.name in row.spans) or (row.kind and span.attributes.get(row.kind) == span.name):
            return ""
    name = span.name.removeprefix("invoke_agent ").removeprefix("invoke_workflow ")
    return stable(_METHOD.sub("", name))


def tool_name(span: Span) -> str:
    """Return the name of a tool."""
    return first_text(span, "tool") or _METHOD.sub("", span.name)
