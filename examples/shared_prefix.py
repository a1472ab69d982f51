"""Prompts that begin alike are computed once: the second request finds the first one's KV blocks."""

from mainspring import LLM, SamplingParams

RULES = "You are a careful assistant. You answer briefly, in English, and never invent facts. " * 4
QUESTIONS = ["Question: What is 2 + 2? Answer:", "Question: Who wrote Hamlet? Answer:"]


def main() -> None:
    with LLM("smollm2-135m", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        for question in QUESTIONS:
            output = llm.generate(RULES + question, params, use_tqdm=False)[0]
            print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")


if __name__ == "__main__":
    main()
