"""vLLM's two measurements without a server: many requests at once (throughput), and one batch after another
(latency). Flags and the keys of the JSON are those of `vllm bench throughput` and `vllm bench latency`.

Answers have a fixed length, whatever the model would say. Prefix caching is off unless it is asked for, as in
vLLM: prompts come again in every round of `latency`, and would be found.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.bench.arguments import LatencyArgs, ThroughputArgs
from mainspring.bench.throughput import TOKEN_RANGE, kernels_in_use
from mainspring.frontend.llm_engine import LLMEngine

if TYPE_CHECKING:
    from mainspring.frontend.tokenizer import Tokenizer

PERCENTILES = (10, 25, 50, 75, 90, 99)
# Of conversations, as vLLM chooses them: what is too short to measure, and what few engines take.
LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048

OnDone = Callable[[int], object]  # so many more requests, or rounds, are done


class Sample(NamedTuple):
    prompt_token_ids: list[int]
    output_len: int


def random_samples(num: int, input_len: int, output_len: int, rng: random.Random) -> list[Sample]:
    return [Sample(rng.choices(TOKEN_RANGE, k=input_len), output_len) for _ in range(num)]


def sharegpt_samples(args: ThroughputArgs, tokenizer: Tokenizer, rng: random.Random) -> list[Sample]:
    """First question and answer of conversations of the file, in random order; from the beginning again where
    they are too few. Raises `ConfigError`."""
    assert args.dataset_path is not None
    samples = []
    for question, answer in _conversations(args.dataset_path, rng):
        prompt = tokenizer.encode(question)
        output_len = args.output_len or len(tokenizer.encode(answer))
        fits = len(prompt) <= MOST_PROMPT_TOKENS and len(prompt) + output_len <= MOST_TOKENS
        if fits and min(len(prompt), output_len) >= LEAST_TOKENS:
            samples.append(Sample(prompt, output_len))
        if len(samples) == args.num_prompts:
            break
    if not samples:
        raise ConfigError(
            f"dataset_path {args.dataset_path} has no conversation of {LEAST_TOKENS} to {MOST_TOKENS} tokens"
        )
    return [samples[i % len(samples)] for i in range(args.num_prompts)]


def _conversations(path: str, rng: random.Random) -> list[tuple[str, str]]:
    """(question, answer) of each conversation that has both."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        turns = [entry["conversations"] for entry in found]
        pairs = [(turn[0]["value"], turn[1]["value"]) for turn in turns if len(turn) >= 2]
    except OSError as error:
        raise ConfigError(f"dataset_path {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError):
        raise ConfigError(
            f"dataset_path {path} must be a JSON list of objects such as "
            '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
        ) from None
    rng.shuffle(pairs)
    return pairs


# --- rounds -------------------------------------------------------------------------------------------------


def engine_args(given: Mapping[str, Any]) -> EngineArgs:
    return EngineArgs.from_mapping({"enable_prefix_caching": False, **given})


def run(engine: LLMEngine, samples: Iterable[Sample], on_done: OnDone = lambda number: None) -> float:
    """Seconds until all are answered."""
    start = time.perf_counter()
    for index, sample in enumerate(samples):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=sample.output_len,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(index), {"prompt_token_ids": sample.prompt_token_ids}, params)
    while engine.has_unfinished_requests():
        on_done(sum(output.finished for output in engine.step()))
    return time.perf_counter() - start


def measure_throughput(
    args: ThroughputArgs, given: Mapping[str, Any], on_done: OnDone = lambda number: None
) -> dict[str, Any]:
    """`given` are fields of `EngineArgs`."""
    rng = random.Random(args.seed)
    settings = engine_args(given)
    with LLMEngine.from_engine_args(settings) as engine:
        if args.dataset_name == "random":
            samples = random_samples(args.num_prompts, args.input_len or 1024, args.output_len or 128, rng)
        else:
            if engine.tokenizer is None:
                raise ConfigError("dataset_name sharegpt needs a tokenizer: leave out skip_tokenizer_init")
            samples = sharegpt_samples(args, engine.tokenizer, rng)
        run(engine, random_samples(1, 16, 2, rng))  # what is made at first use is made before
        elapsed_s = run(engine, samples, on_done)
    num_prompt = sum(len(sample.prompt_token_ids) for sample in samples)
    num_output = sum(sample.output_len for sample in samples)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(samples),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(samples) / elapsed_s,
        "tokens_per_second": (num_prompt + num_output) / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "model": settings.model,
        "kernels": kernels_in_use(settings),
    }


def measure_latency(
    args: LatencyArgs, given: Mapping[str, Any], on_done: OnDone = lambda number: None
) -> dict[str, Any]:
    """`given` are fields of `EngineArgs`; `on_done` is told of rounds, those of warming up included."""
    settings = engine_args(given)
    samples = random_samples(args.batch_size, args.input_len, args.output_len, random.Random(args.seed))
    latencies_s = []
    with LLMEngine.from_engine_args(settings) as engine:
        for _ in range(args.num_iters_warmup + args.num_iters):
            latencies_s.append(run(engine, samples))
            on_done(1)
    latencies_s = latencies_s[args.num_iters_warmup :]
    return {
        "avg_latency": statistics.fmean(latencies_s),
        "latencies": latencies_s,
        "percentiles": {str(percent): percentile(latencies_s, percent) for percent in PERCENTILES},
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "model": settings.model,
        "kernels": kernels_in_use(settings),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """With a straight line between neighbours."""
    return float(np.percentile(values, percent))


# --- for people ---------------------------------------------------------------------------------------------


def throughput_table(figures: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            f"{figures['model']}, kernels {figures['kernels']}: {figures['num_requests']} requests in "
            f"{figures['elapsed_time']:.2f} s",
            "",
            f"{'requests':<16} {figures['requests_per_second']:>10.2f} /s",
            f"{'tokens':<16} {figures['tokens_per_second']:>10.1f} /s  (prompts and answers)",
            f"{'tokens written':<16} {figures['output_tokens_per_second']:>10.1f} /s",
            f"{'prompt tokens':<16} {figures['num_prompt_tokens']:>10}",
            f"{'answer tokens':<16} {figures['num_output_tokens']:>10}",
        ]
    )


def latency_table(figures: Mapping[str, Any]) -> str:
    shape = f"{figures['batch_size']} x ({figures['input_len']} + {figures['output_len']})"
    lines = [
        f"{figures['model']}, kernels {figures['kernels']}: {len(figures['latencies'])} rounds of {shape}",
        "",
        f"{'average':<16} {figures['avg_latency']:>8.3f} s",
    ]
    lines += [f"{percent + '%':<16} {value:>8.3f} s" for percent, value in figures["percentiles"].items()]
    return "\n".join(lines)
