"""mainspring as a user of the library gets it: `LLM(model)`, with the engine in a process of its own."""

import time

from answering import Done, Load, Loaded, Run, answer_orders


class Mainspring:
    def load(self, load: Load) -> Loaded:
        import mainspring

        self._llm = mainspring.LLM(load.model, **load.settings)
        place = "the caller's process" if load.settings.get("in_process") else "a process of its own"
        return Loaded(mainspring.__version__, {**load.settings, "engine in": place})

    def run(self, run: Run) -> Done:
        from mainspring import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=run.num_output_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in run.prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Done(seconds, [output.outputs[0].token_ids for output in outputs])


if __name__ == "__main__":
    answer_orders(Mainspring())
