"""What a client may send: OpenAI's fields and vLLM's extensions, as types.

Rules.
1. A field that is not named here is ignored, and a warning in the log names it once; a field of a wrong type
   is a 400 that names it. null is the same as absent.
2. A field that is named here does what it says or is refused by name (`refused.py`): accepted and without
   effect are only those that cannot change an answer (`user`, `metadata` and the like).
3. Nothing is judged here but types; `sampling.py` and the engine judge values.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no effect: nothing is padded


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's; exactly one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    lenient: bool | None = None  # ours: see `StructuredOutputsParams`


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    # of the two forms of a structural tag
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chats and completions have in common."""

    model: str | None = None
    # how to choose
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    use_beam_search: bool | None = None  # `n` beams, instead of sampling
    length_penalty: float | None = None  # of beams
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    # when to stop
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    # what the text must be
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    # what to report
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # the prompt
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    # the engine
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    # without effect on an answer
    user: str | None = None
    session_id: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    return_mm_kwargs: bool | None = None
    mm_payload: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    routed_experts_prompt_start: int | None = None
    early_stopping: bool | None = None  # of a beam search, which ends when it must
    # refused unless they ask for nothing
    logprob_token_ids: list[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    return_token_offsets: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # goes before max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = None
    # tools
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # reasoning
    include_reasoning: bool | None = None  # false: it is left out of the answer
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None  # most tokens of it
    # without effect on an answer
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    # refused unless they ask for nothing
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    thinking_token_budget: int | None = None  # refused: only chats have reasoning
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# Texts that are read and not continued.


class ReadingRequest(msgspec.Struct, kw_only=True):
    """What these requests have in common."""

    model: str | None = None
    use_activation: bool | None = None  # vectors of length 1, scores as probabilities
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    # the engine
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    # without effect on an answer
    user: str | None = None
    padding: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    # refused unless they ask for nothing
    normalize: bool | None = None


class InputRequest(ReadingRequest, kw_only=True):
    """Texts, lists of token ids, or a chat."""

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class VectorRequest(InputRequest, kw_only=True):
    dimensions: int | None = None
    encoding_format: str | None = None  # float, base64
    embed_dtype: str | None = None  # of base64: float32, float16
    endianness: str | None = None  # likewise: native, little, big


class EmbeddingRequest(VectorRequest, kw_only=True):
    """`POST /v1/embeddings`."""


class PoolingRequest(VectorRequest, kw_only=True):
    """`POST /pooling`."""

    task: str | None = None


class ClassifyRequest(InputRequest, kw_only=True):
    """`POST /classify`."""


Texts = str | list[str]


class PairRequest(ReadingRequest, kw_only=True):
    """What scores and rankings have in common."""

    # refused unless they ask for nothing
    instruction: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None


class ScoreRequest(PairRequest, kw_only=True):
    """`POST /score`: one pair of fields."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RankedDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PairRequest, kw_only=True):
    """`POST /rerank`."""

    query: str
    documents: str | list[str | RankedDocument]
    top_n: int | None = None  # 0: all
    return_documents: bool | None = None
