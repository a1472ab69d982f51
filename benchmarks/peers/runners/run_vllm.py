"""vLLM's CPU build: bfloat16, compiled by inductor, prefix caching on. What its guide for CPUs recommends
beyond that (threads bound to cores, tcmalloc, Intel's OpenMP) is in the environment that `engines.py` makes.
"""

import os
import time

from answering import Done, Load, Loaded, Run, answer_orders

KV_BYTES_PER_GIB = 1 << 30
RECOMMENDED = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "LD_PRELOAD")


class VLLM:
    def load(self, load: Load) -> Loaded:
        import vllm

        settings = {
            "dtype": "bfloat16",
            "max_model_len": load.max_len,
            "max_num_seqs": load.max_requests,
            "kv_cache_memory_bytes": 2 * KV_BYTES_PER_GIB,
            "enable_prefix_caching": True,
            **load.settings,
        }
        self._llm = vllm.LLM(load.model, disable_log_stats=True, **settings)
        chosen = {name: os.environ[name] for name in RECOMMENDED if name in os.environ}
        return Loaded(vllm.__version__, {**settings, **chosen})

    def run(self, run: Run) -> Done:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=run.num_output_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in run.prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Done(seconds, [output.outputs[0].token_ids for output in outputs])


if __name__ == "__main__":
    answer_orders(VLLM())
