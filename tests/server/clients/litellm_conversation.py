"""The same by litellm: argv has the base URL and the key."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

BASE_URL, KEY = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
ANSWER = "The capital of Germany is Berlin."
given = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0, "max_tokens": 8, "num_retries": 0}

for provider in ("hosted_vllm", "openai"):
    model = f"{provider}/smol"
    answer = litellm.completion(model=model, messages=QUESTION, **given)
    assert answer.choices[0].message.content == ANSWER
    stream = litellm.completion(model=model, messages=QUESTION, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
text = litellm.text_completion(
    model="text-completion-openai/smol", prompt="The capital of France is", **given
)
assert text.choices[0].text.startswith(" Paris")
try:
    litellm.completion(model="openai/zz", messages=QUESTION, **given)
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that does not exist answered")
print("litellm")
