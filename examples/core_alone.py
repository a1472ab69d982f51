"""The engine core without a model: a fake says what it is told. It shows what a step is."""

from mainspring import EngineArgs, SamplingParams
from mainspring.base.config import ModelFacts, resolve
from mainspring.base.messages import EngineCoreRequest
from mainspring.engine.build import build_engine
from mainspring.testing.fake_executor import ScriptedExecutor


def main() -> None:
    facts = ModelFacts(path="", architecture="none", max_position_embeddings=64, vocab_size=64)
    args = EngineArgs(max_num_batched_tokens=8, max_num_seqs=4, block_size=4, num_gpu_blocks_override=20)
    executor = ScriptedExecutor(
        {"short": [1, 2, 3, 4], "long": [11, 12, 13, 14]}, num_blocks=20, block_size=4
    )
    core = build_engine(resolve(args, facts), executor).core
    for name, length in (("short", 3), ("long", 12)):  # the long one takes two steps to read
        params = SamplingParams(max_tokens=4, seed=0)
        core.add_request(EngineCoreRequest(name, list(range(length)), params))
    step = 0
    while core.has_work():
        step += 1
        for outputs in core.step().values():
            for output in outputs.outputs:
                end = "" if output.finish_reason is None else f"  {output.finish_reason}"
                print(f"step {step}  {output.request_id:<6}{output.new_token_ids}{end}")


if __name__ == "__main__":
    main()
