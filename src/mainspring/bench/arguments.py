"""What the measurements can be told, under vLLM's names: each field is a flag. Nothing is imported for it.

All raise `ConfigError` for what makes no sense, a line for each thing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mainspring.base.errors import ConfigError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputArgs:
    """Many requests at once."""

    dataset_name: Literal["random", "sharegpt"] = "random"
    dataset_path: str | None = None  # of sharegpt
    num_prompts: int = 1000
    input_len: int | None = None  # random: 1024
    output_len: int | None = None  # random: 128; sharegpt: as long as the answer in the file
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = _below_one(self, "num_prompts", "input_len", "output_len")
        if (self.dataset_name == "sharegpt") != (self.dataset_path is not None):
            wrong.append("dataset_path names the file of dataset_name sharegpt: give both or neither")
        if self.dataset_name == "sharegpt" and self.input_len is not None:
            wrong.append("input_len is for random prompts; those of sharegpt have their own length")
        if wrong:
            raise ConfigError("\n".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyArgs:
    """One batch after another."""

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters_warmup: int = 10
    num_iters: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = _below_one(self, "input_len", "output_len", "batch_size", "num_iters")
        if self.num_iters_warmup < 0:
            wrong.append(f"num_iters_warmup {self.num_iters_warmup} must not be negative")
        if wrong:
            raise ConfigError("\n".join(wrong))


def _below_one(args: object, *names: str) -> list[str]:
    values = {name: getattr(args, name) for name in names}
    return [f"{name} {n} must be at least 1" for name, n in values.items() if n is not None and n < 1]


@dataclass(slots=True, kw_only=True)
class LoadArgs:
    """A server under load."""

    backend: Literal["openai", "openai-chat"] = "openai-chat"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str | None = None  # None: the backend's
    model: str | None = None  # None: the first that the server lists
    header: list[str] = field(default_factory=list)  # "Name=value"
    dataset_name: Literal["random"] = "random"
    num_prompts: int = 100
    num_warmups: int = 1
    request_rate: float = math.inf  # per second
    burstiness: float = 1.0
    max_concurrency: int | None = None
    random_input_len: int = 128
    random_output_len: int = 128
    random_range_ratio: float = 0.0  # lengths are drawn from len * (1 +- ratio)
    random_prefix_len: int = 0  # tokens that all prompts begin with
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    goodput: list[str] = field(default_factory=list)  # "ttft:500", in milliseconds
    metric_percentiles: list[float] = field(default_factory=lambda: [50.0, 90.0, 99.0])
    ready_check_timeout_sec: float = 60.0
    server_pid: int | None = None  # whose CPU time is read, on this machine

    def __post_init__(self) -> None:
        wrong = []
        if self.backend not in ENDPOINTS:
            wrong.append(f"backend {self.backend!r} must be one of {', '.join(ENDPOINTS)}")
        for name in ("num_prompts", "random_input_len", "random_output_len"):
            if getattr(self, name) < 1:
                wrong.append(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("num_warmups", "random_prefix_len"):
            if getattr(self, name) < 0:
                wrong.append(f"{name} {getattr(self, name)} must not be negative")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name} {getattr(self, name)} must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            wrong.append(f"max_concurrency {self.max_concurrency} must be at least 1")
        if not 0 <= self.random_range_ratio < 1:
            wrong.append(f"random_range_ratio {self.random_range_ratio} must be from 0 to below 1")
        if not all(0 < percent < 100 for percent in self.metric_percentiles):
            wrong.append(f"metric_percentiles {self.metric_percentiles} must be between 0 and 100")
        if any("=" not in text for text in self.header):
            wrong.append("header must be Name=value")
        try:
            objectives(self.goodput)
        except ConfigError as error:
            wrong.append(str(error))
        if wrong:
            raise ConfigError("\n".join(wrong))

    @property
    def headers(self) -> dict[str, str]:
        given = dict(text.split("=", 1) for text in self.header)
        if (key := os.environ.get("OPENAI_API_KEY")) is not None:
            return {"Authorization": f"Bearer {key}"} | given
        return given


def objectives(goodput: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric, from "ttft:500". Raises `ConfigError`."""
    limits = {}
    for text in goodput:
        name, _, limit = text.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = -1.0
        if name not in METRICS or not limits[name] > 0:
            raise ConfigError(f"goodput {text!r} must be like ttft:500, one of {', '.join(METRICS)} in ms")
    return limits
