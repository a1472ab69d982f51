"""vLLM's CPU build: bfloat16, compiled by inductor, prefix caching on. What its guide for CPUs recommends
beyond that (threads bound to cores, tcmalloc, Intel's OpenMP) is in the environment that `engines.py` makes.
"""

import os
import time

from answering import Done, Load, Loaded, Run, answer_orders

KV_CACHE_BYTES = 2 << 30


class VLLM:
    def load(self, load: Load) -> Loaded:
        import vllm

        settings = {
            "dtype": "bfloat16",
            "max_model_len": load.max_len,
            "max_num_seqs": load.max_requests,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "enable_prefix_caching": True,
            **load.settings,
        }
        self._llm = vllm.LLM(load.model, disable_log_stats=True, **settings)
        preloaded = [os.path.basename(library) for library in os.environ["LD_PRELOAD"].split(":")]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
            "LD_PRELOAD": " ".join(preloaded),
        }
        return Loaded(vllm.__version__, settings | environment)

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
