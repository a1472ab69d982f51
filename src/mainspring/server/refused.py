"""What clients may ask for and cannot have: refused by name, never passed over in silence.

A field is refused where it asks for something; null, and the value that asks for nothing, are fine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mainspring.server.errors import ApiError

FUNCTIONS = "functions and function_call are old; send tools and tool_choice"
AUDIO = "audio is not supported: answers are text; leave it out"
# field -> (values that ask for nothing, what to say)
FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((), FUNCTIONS),
    "function_call": (("none", "auto"), FUNCTIONS),
    "modalities": ((["text"],), AUDIO),
    "audio": ((), AUDIO),
    "web_search_options": ((), "web search is not supported; leave it out"),
    "logprob_token_ids": (([],), "logprobs of chosen ids are not supported yet; use logprobs"),
    "repetition_detection": ((), "repetition detection is not supported yet; use repetition_penalty"),
    "watermarking": ((False,), "watermarks are not supported; leave it out"),
    "vllm_xargs": (({},), "no plugin reads extra arguments here; leave them out"),
    "kv_transfer_params": (({},), "KV transfer is not supported yet; leave it out"),
    "ec_transfer_params": (({},), "encoder transfer is not supported; leave it out"),
    "return_token_offsets": ((False,), "token offsets are not supported yet; use return_token_ids"),
    "suffix": (("",), "suffix needs a model that fills gaps, and this one continues texts; leave it out"),
    "normalize": ((), "normalize is called use_activation"),
    "instruction": (("",), "instructions of rerankers are not supported yet; put them into the query"),
    "max_tokens_per_query": ((0,), "queries are not cut on their own yet; use truncate_prompt_tokens"),
    "max_tokens_per_doc": ((0,), "documents are not cut on their own yet; use truncate_prompt_tokens"),
    "prompt_embeds": (([],), "prompts are text or token ids; embeddings are not supported yet"),
}


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raises `ApiError` (400) for the first field of `FIELDS` that asks for something."""
    for name, (nothing, words) in FIELDS.items():
        value = getattr(body, name, None)
        if value is not None and value not in nothing:
            raise ApiError(400, words if words.startswith(name) else f"{name}: {words}", name)
