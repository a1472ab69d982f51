"""mainspring: a language model engine that starts in a second and needs neither GPU nor torch.

    from mainspring import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        answers = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=40))
        print(answers[0].outputs[0].text)

Names are looked up when they are first used, so importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mainspring.base.config import AsyncEngineArgs, EngineArgs
    from mainspring.base.errors import (
        CheckpointError,
        ConfigError,
        EngineDeadError,
        EngineError,
        QueueOverflowError,
        RequestError,
    )
    from mainspring.base.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from mainspring.base.params import (
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from mainspring.frontend.async_llm import AsyncLLM
    from mainspring.frontend.llm import LLM
    from mainspring.frontend.llm_engine import LLMEngine

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CheckpointError",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineError",
    "LLMEngine",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "QueueOverflowError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]

_HOME = {
    "LLM": "frontend.llm",
    "AsyncEngineArgs": "base.config",
    "AsyncLLM": "frontend.async_llm",
    "CheckpointError": "base.errors",
    "ClassificationRequestOutput": "base.outputs",
    "CompletionOutput": "base.outputs",
    "ConfigError": "base.errors",
    "EmbeddingRequestOutput": "base.outputs",
    "EngineArgs": "base.config",
    "EngineDeadError": "base.errors",
    "EngineError": "base.errors",
    "LLMEngine": "frontend.llm_engine",
    "Logprob": "base.outputs",
    "PoolingParams": "base.params",
    "PoolingRequestOutput": "base.outputs",
    "QueueOverflowError": "base.errors",
    "RequestError": "base.errors",
    "RequestOutput": "base.outputs",
    "RequestOutputKind": "base.params",
    "SamplingParams": "base.params",
    "ScoringRequestOutput": "base.outputs",
    "StructuredOutputsParams": "base.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
