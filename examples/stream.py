"""A chat whose answer is shown while it is written. Leaving the loop early would abort the request."""

from mainspring import LLM, SamplingParams

MESSAGES = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of Germany?"},
]


def main() -> None:
    with LLM("smollm2-135m", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        for output in llm.generate_stream(llm.chat_prompt(MESSAGES), params):
            print(output.outputs[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
