"""vLLM's flags that no setting here answers to, and what becomes of each: the one table of the command line.

A command line that works with vLLM shall work here where it means the same, and say so where it does not. A
flag is looked up here only where the command has none of that name, so a row can go when its setting comes.
What a program may pass is in `VLLM_ARGUMENTS` of `base/config.py`, which words most refusals here too.
"""

from __future__ import annotations

from typing import NamedTuple

from mainspring.base.config import VLLM_ARGUMENTS

# Taken with a warning: with a value, and switches (which have a --no- form too). "O" is -O.
NO_EFFECT_VALUES = (
    *("O", "attention-backend", "compilation-config", "cpu-offload-gb", "cudagraph-capture-sizes"),
    *(
        "ignore-patterns",
        "max-log-len",
        "max-parallel-loading-workers",
        "max-seq-len-to-capture",
        "model-impl",
    ),
    # Engines of several servers do not speak with each other.
    *("data-parallel-address", "data-parallel-rpc-port"),
    *("numa-bind-nodes", "optimization-level", "performance-mode", "prefix-caching-hash-algo"),
    *("pt-load-map-location", "safetensors-load-strategy", "swap-space", "uvicorn-log-level"),
)
NO_EFFECT_SWITCHES = (
    *("disable-cascade-attn", "disable-custom-all-reduce", "disable-frontend-multiprocessing"),
    *("disable-log-requests", "enable-log-requests", "enable-per-request-metrics"),
    *("enable-request-id-headers", "enable-server-load-tracking", "enable-sleep-mode", "numa-bind"),
    *("use-tqdm-on-load",),
)
# What is done here anyway: these values are taken in silence, others refused.
FITTING = {
    "api-server-count": ("1",),
    "backend": ("vllm",),  # of benchmarks without a server
    "config-format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data-parallel-backend": ("mp",),
    "device": ("auto", "cpu"),
    "generation-config": ("auto", "vllm"),
    "guided-decoding-backend": ("auto", "guidance"),
    "logprobs-mode": ("raw_logprobs",),
    "max-long-partial-prefills": ("1",),
    "max-num-partial-prefills": ("1",),
    "nnodes": ("1",),
    "node-rank": ("0",),
    "stream-interval": ("1",),
    "tokenizer-mode": ("auto", "hf"),
}
# The same for objects, by key.
FITTING_OBJECTS = {
    "structured-outputs-config": {
        "backend": ("auto", "guidance"),
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "disable_fallback": (True, False),
        "reasoning_parser": ("",),
    },
}
# Refused: what is said after the flag.
MANY_MACHINES = ": workers on several machines are not supported yet; leave it out"
HEADLESS = ": engines without a server are not supported yet; see --data-parallel-hybrid-lb"
TOOLS = ": tools are described in requests here, and read by --tool-call-parser; leave it out"
ADAPTERS = ": adapters (LoRA) are not supported yet; leave it out"
DRAFTS = ": draft tokens (speculative decoding) are not supported yet; leave it out"
MEDIA = ": prompts are text here, images and sounds are not supported yet; leave it out"
TRANSFER = ": KV transfer between machines is not supported yet; leave it out"
REFUSED = {
    **dict.fromkeys(("tool-parser-plugin", "tool-server"), TOOLS),
    **dict.fromkeys(
        ("enable-lora", "lora-modules", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-dtype"), ADAPTERS
    ),
    **dict.fromkeys(
        (
            *("enable-eplb", "eplb-config", "master-addr", "master-port"),
            "ray-workers-use-nsight",
        ),
        MANY_MACHINES,
    ),
    "headless": HEADLESS,
    **dict.fromkeys(("speculative-config", "sc", "spec-method", "spec-model", "spec-tokens"), DRAFTS),
    **dict.fromkeys(
        ("limit-mm-per-prompt", "mm-processor-kwargs", "allowed-local-media-path", "media-io-kwargs"), MEDIA
    ),
    **dict.fromkeys(("kv-transfer-config", "kv-events-config", "ec-transfer-config"), TRANSFER),
    **dict.fromkeys(
        (
            *(
                "chat-template-content-format",
                "collect-detailed-traces",
                "fingerprint-mode",
                "log-config-file",
            ),
            *(
                "mamba-cache-dtype",
                "mamba-ssm-cache-dtype",
                "middleware",
                "pooler-config",
                "weight-transfer-config",
            ),
        ),
        " is not supported yet; leave it out",
    ),
}


class Foreign(NamedTuple):
    """A flag that is taken although no setting answers to it."""

    name: str  # without its hyphens
    takes_value: bool
    values: tuple[str, ...] | None  # those that are taken in silence; None: any, with a warning


def foreign_flags() -> list[Foreign]:
    return [
        *(Foreign(name, True, None) for name in NO_EFFECT_VALUES),
        *(Foreign(name, False, None) for name in NO_EFFECT_SWITCHES),
        *(Foreign(name, True, values) for name, values in FITTING.items()),
    ]


def refusal(flag: str) -> str | None:
    """What to say of a flag of vLLM's that cannot be had; None for one that vLLM does not have either."""
    name = flag.lstrip("-").removeprefix("no-").partition(".")[0]
    words = REFUSED.get(name)
    if words is None and (known := VLLM_ARGUMENTS.get(name.replace("-", "_"))):
        words = f" {known}"
    return None if words is None else flag + words
