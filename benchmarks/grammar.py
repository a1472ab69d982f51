"""What structured outputs cost: the masks' share of a step, and what a large schema does to its neighbours.

1. The share of a step's wall time that making masks takes, with 64 requests that each fill in a form.
2. The longest wait between two tokens of plain streams, alone and while schemas of 50 kB are compiled beside
   them: each is new, so each is checked in the front end's process and compiled in the core's.

A run takes about a minute. Waits are those a reader of `AsyncLLM` sees, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from mainspring import AsyncLLM, SamplingParams
from mainspring.base.config import EngineArgs
from mainspring.base.messages import GrammarOutput, SchedulerOutput
from mainspring.base.params import RequestOutputKind, StructuredOutputsParams
from mainspring.engine.client import InprocClient
from mainspring.frontend.llm_engine import LLMEngine

NUM_STRUCTURED = 64
NUM_STREAMS = 4
LARGE_SCHEMA_BYTES = 50_000
NUM_LARGE = 10
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "height": {"type": "number", "minimum": 0, "maximum": 3},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "colour": {"enum": ["red", "green", "blue"]},
        "notes": {"type": "string"},
    },
    "required": ["name", "email", "born", "height", "likes", "colour", "notes"],
    "additionalProperties": False,
}


def large_schema(number: int) -> dict[str, Any]:
    """About 50 kB, and none like another."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < LARGE_SCHEMA_BYTES:
        for i in range(len(properties), len(properties) + 20):
            properties[f"field_{number}_{i}"] = {
                "type": "object",
                "properties": {
                    "label": {"type": "string", "maxLength": 50},
                    "kind": {"enum": ["a", "b", f"c{i}"]},
                    "value": {"type": "integer", "minimum": i, "maximum": 1000 + i},
                },
                "required": ["label"],
                "additionalProperties": False,
            }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def mask_share(args: EngineArgs, num_tokens: int) -> dict[str, float]:
    """Of all steps in which all of 64 structured requests sample."""
    args.in_process = True
    mask_s, step_s, masks_of_step, steps = 0.0, 0.0, [0.0], 0
    with LLMEngine.from_engine_args(args) as engine:
        assert isinstance(engine.client, InprocClient)
        scheduler = engine.client.built.core.scheduler
        plain = scheduler.get_grammar_bitmask

        def timed(plan: SchedulerOutput) -> GrammarOutput | None:
            started_s = time.perf_counter()
            mask = plain(plan)
            masks_of_step[0] = time.perf_counter() - started_s
            return mask

        scheduler.get_grammar_bitmask = timed  # type: ignore[method-assign]
        for i in range(NUM_STRUCTURED):
            params = SamplingParams(
                max_tokens=num_tokens,
                temperature=1.0,
                seed=i,
                structured_outputs=StructuredOutputsParams(json=FORM),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(i), "A person, as JSON:", params)
        while engine.has_unfinished_requests():
            started_s = time.perf_counter()
            engine.step()
            if scheduler.stats().num_running == NUM_STRUCTURED:
                steps += 1
                step_s += time.perf_counter() - started_s
                mask_s += masks_of_step[0]
    return {
        "steps": steps,
        "step_ms": 1000 * step_s / steps,
        "mask_ms": 1000 * mask_s / steps,
        "share": mask_s / step_s,
    }


async def longest_wait_s(llm: AsyncLLM, compile_beside: bool, num_tokens: int) -> tuple[float, float]:
    """The longest and the median wait between two tokens of a plain stream."""
    waits: list[float] = []

    async def read(i: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        params.output_kind = RequestOutputKind.DELTA
        last_s = 0.0
        async for _ in llm.generate([100 + i] * 8, params, f"plain-{i}"):
            now_s = time.perf_counter()
            if last_s:
                waits.append(now_s - last_s)
            last_s = now_s

    async def ask(number: int) -> None:
        structure = StructuredOutputsParams(json=large_schema(number))
        params = SamplingParams(max_tokens=1, structured_outputs=structure)
        async for _ in llm.generate([200], params, f"large-{number}"):
            pass

    streams = [asyncio.create_task(read(i)) for i in range(NUM_STREAMS)]
    if compile_beside:
        await asyncio.sleep(0.5)
        for number in range(NUM_LARGE):
            await ask(number)
            await asyncio.sleep(0.05)
    await asyncio.gather(*streams)
    waits.sort()
    return waits[-1], waits[len(waits) // 2]


async def neighbours(args: EngineArgs, num_tokens: int) -> dict[str, float]:
    args.in_process = False
    llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    async with llm:
        await llm.prepare_structured_outputs()  # as a server does before it is ready
        alone_s, median_s = await longest_wait_s(llm, False, num_tokens)
        beside_s, beside_median_s = await longest_wait_s(llm, True, num_tokens)
    return {
        "alone_median_ms": 1000 * median_s,
        "alone_longest_ms": 1000 * alone_s,
        "beside_median_ms": 1000 * beside_median_s,
        "beside_longest_ms": 1000 * beside_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tokens", type=int, default=60, help="of each structured answer")
    parser.add_argument("--stream-tokens", type=int, default=150, help="of each plain stream")
    given = parser.parse_args()

    def args() -> EngineArgs:
        return EngineArgs(model=given.model, kernels=given.kernels, max_model_len=2048)

    share = mask_share(args(), given.tokens)
    print(
        f"{NUM_STRUCTURED} structured requests: masks {share['mask_ms']:.1f} ms of a step of "
        f"{share['step_ms']:.0f} ms, {share['share']:.1%} ({share['steps']:.0f} steps)"
    )
    waits = asyncio.run(neighbours(args(), given.stream_tokens))
    print(
        f"{NUM_STREAMS} plain streams: median wait {waits['alone_median_ms']:.1f} ms, longest "
        f"{waits['alone_longest_ms']:.1f} ms; beside {NUM_LARGE} schemas of {LARGE_SCHEMA_BYTES // 1000} kB: "
        f"median {waits['beside_median_ms']:.1f} ms, longest {waits['beside_longest_ms']:.1f} ms"
    )


if __name__ == "__main__":
    main()
