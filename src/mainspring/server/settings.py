"""What a server can be told beside the engine's settings (`EngineArgs`): vLLM's names, one field a flag."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mainspring.base.errors import ConfigError
from mainspring.checkpoint.hf_config import GENERATION
from mainspring.frontend.manner import AUTO, NONE, manner_of
from mainspring.frontend.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

DEFAULT_HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 32 << 20


@dataclass(slots=True, kw_only=True)
class ServerSettings:
    """Each field's `metadata["help"]` is the flag's help text."""

    # where
    host: str | None = field(
        default=None,
        metadata={
            "help": f"address to listen on; default: {DEFAULT_HOST}, this machine alone; 0.0.0.0: everybody"
        },
    )
    port: int = field(default=8000, metadata={"help": "port to listen on; 0: a free one"})
    uds: str | None = field(
        default=None, metadata={"help": "a Unix socket to listen on, instead of an address"}
    )
    root_path: str = field(default="", metadata={"help": "the path under which a proxy shows the server"})
    ssl_keyfile: str | None = field(default=None, metadata={"help": "TLS: the private key"})
    ssl_certfile: str | None = field(default=None, metadata={"help": "TLS: the certificate"})
    ssl_ca_certs: str | None = field(default=None, metadata={"help": "TLS: whose clients are trusted"})
    ssl_cert_reqs: int = field(
        default=0, metadata={"help": "TLS: must clients have a certificate? 0: no, 1: perhaps, 2: yes"}
    )
    ssl_ciphers: str | None = field(default=None, metadata={"help": "TLS: ciphers, in OpenSSL's words"})
    # who
    api_key: list[str] = field(
        default_factory=list, metadata={"help": "keys that clients must have one of; also MAINSPRING_API_KEY"}
    )
    served_model_name: list[str] = field(
        default_factory=list,
        metadata={"help": "names under which clients know the model; the first is shown"},
    )
    allowed_origins: list[str] = field(
        default_factory=list, metadata={"help": "CORS: origins of web pages that may ask; default: all"}
    )
    allowed_methods: list[str] = field(default_factory=list, metadata={"help": "CORS: methods; default: all"})
    allowed_headers: list[str] = field(default_factory=list, metadata={"help": "CORS: headers; default: all"})
    allow_credentials: bool = field(default=False, metadata={"help": "CORS: may pages send cookies?"})
    # what
    response_role: str = field(default="assistant", metadata={"help": "role of chat answers"})
    trust_request_chat_template: bool = field(
        default=False, metadata={"help": "may a request bring its own chat template?"}
    )
    enable_auto_tool_choice: bool = field(
        default=True, metadata={"help": "may a model call tools of its own accord?"}
    )
    tool_call_parser: str = field(
        default=AUTO,
        metadata={
            "help": f"how the model writes calls of tools: {', '.join(TOOL_FORMATS)}; {AUTO}: as its chat "
            f"template shows; {NONE}: its calls are text"
        },
    )
    reasoning_parser: str = field(
        default=AUTO,
        metadata={
            "help": f"how the model marks its reasoning: {', '.join(REASONING_FORMATS)}; {AUTO}: as its chat "
            f"template shows; {NONE}: it is part of the content"
        },
    )
    default_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "for templates, where a request says nothing"}
    )
    override_generation_config: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "sampling defaults where a request says nothing: temperature, top_p, top_k, min_p, "
            "repetition_penalty, max_new_tokens"
        },
    )
    return_tokens_as_token_ids: bool = field(
        default=False, metadata={"help": 'show tokens as "token_id:5" beside their logprobs'}
    )
    enable_force_include_usage: bool = field(
        default=False, metadata={"help": "streams end with usage, also where nobody asked"}
    )
    enable_prompt_tokens_details: bool = field(
        default=False, metadata={"help": "usage tells how many prompt tokens were cached"}
    )
    enable_tokenizer_info_endpoint: bool = field(default=False, metadata={"help": "GET /tokenizer_info"})
    server_dev_mode: bool = field(
        default=False,
        metadata={"help": "endpoints that steer the engine (sleep, pause, ...); not for strangers"},
    )
    disable_fastapi_docs: bool = field(default=False, metadata={"help": "no /openapi.json"})
    # limits
    max_request_bytes: int = field(default=MAX_REQUEST_BYTES, metadata={"help": "largest body of a request"})
    request_timeout: float = field(
        default=60.0,
        metadata={"help": "seconds in which a request's headers, and then its body, must have come"},
    )
    health_timeout: float = field(
        default=60.0, metadata={"help": "seconds without an answer after which the engine is unhealthy"}
    )
    shutdown_timeout: float = field(
        default=0.0,
        metadata={"help": "seconds for requests to finish after SIGTERM; what is left is aborted"},
    )
    max_stored_responses: int = field(
        default=1000, metadata={"help": "how many answers of /v1/responses are kept; 0: none"}
    )
    max_stored_response_bytes: int = field(
        default=64 << 20, metadata={"help": "how many bytes they may be, as JSON; default: 64 MiB"}
    )
    sse_keep_alive_interval: float = field(
        default=0.0, metadata={"help": "seconds after which a silent stream says so; 0: never"}
    )
    # words
    metrics_prefix: str = field(
        default="vllm", metadata={"help": "what the names of the engine's figures at /metrics begin with"}
    )
    otlp_traces_endpoint: str | None = field(
        default=None,
        metadata={"help": "send a span for each request there (OTLP over HTTP); needs the extra otel"},
    )
    disable_uvicorn_access_log: bool = field(default=False, metadata={"help": "no line for each request"})
    disable_access_log_for_endpoints: list[str] = field(
        default_factory=list, metadata={"help": "no lines for these paths"}
    )

    def __post_init__(self) -> None:
        """Raises `ConfigError` with a line for each thing that is wrong."""
        wrong = []
        if not 0 <= self.port <= 65535:
            wrong.append(f"port {self.port} must be from 0 to 65535")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            wrong.append("TLS needs both ssl_keyfile and ssl_certfile")
        if self.uds is not None and self.host is not None:
            wrong.append("give uds or host, not both")
        if self.max_request_bytes < 1:
            wrong.append(f"max_request_bytes {self.max_request_bytes} must be at least 1")
        for name in ("max_stored_responses", "max_stored_response_bytes"):
            if getattr(self, name) < 0:
                wrong.append(f"{name} {getattr(self, name)} must be 0 or more")
        for name in ("request_timeout", "health_timeout"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name} {getattr(self, name)} must be above 0 seconds")
        for name in ("shutdown_timeout", "sse_keep_alive_interval"):
            if not getattr(self, name) >= 0:
                wrong.append(f"{name} {getattr(self, name)} must be 0 seconds or more")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            wrong.append(f"metrics_prefix {self.metrics_prefix!r} must be letters, digits and _")
        try:
            manner_of("", self.tool_call_parser, self.reasoning_parser)
        except ConfigError as error:
            wrong.append(str(error))
        if "" in self.api_key:
            wrong.append("api_key is empty; leave it out, or give a key")
        wrong += [
            f"override_generation_config has {name!r}; it may have {', '.join(GENERATION)}"
            for name in self.override_generation_config
            if name not in GENERATION
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """By the names of `SamplingParams`."""
        return {GENERATION[name]: value for name, value in self.override_generation_config.items()}
