"""Several prompts at once: they share batches, and the answers come in the order of the prompts."""

from mainspring import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is"]


def main() -> None:
    with LLM("smollm2-135m", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            answer = output.outputs[0]
            print(f"{output.prompt} ->{answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
