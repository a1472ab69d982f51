"""How surprised the model is by a text: from the log-probabilities of a prompt's own tokens."""

import math

from mainspring import LLM, SamplingParams

TEXTS = ["The sun rises in the east and sets in the west.", "East the sun the in rises sets and in west the."]


def main() -> None:
    with LLM("smollm2-135m", max_model_len=1024) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for output in llm.generate(TEXTS, params, use_tqdm=False):
            assert output.prompt_logprobs is not None
            # The first position is None: nothing stands before it.
            logprobs = [
                next(iter(position.values())).logprob for position in output.prompt_logprobs if position
            ]
            print(f"{math.exp(-sum(logprobs) / len(logprobs)):8.1f}  {output.prompt}")


if __name__ == "__main__":
    main()
