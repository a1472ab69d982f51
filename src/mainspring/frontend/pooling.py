"""What a caller wants of a text that is only read, decided: by the parameters, and where they are silent by
the model's files. And from what came back to what the caller's method promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mainspring.base.config import ModelFacts
from mainspring.base.errors import EngineError, RequestError
from mainspring.base.messages import Pooling, PoolingActivation
from mainspring.base.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Floats,
    Pooled,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from mainspring.base.params import PoolingParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from mainspring.frontend.tokenizer import Tokenizer


def resolved(params: PoolingParams, facts: ModelFacts) -> Pooling:
    """Raises `RequestError` for what this model has no answer to."""
    how, task = facts.pooling, params.task or ("classify" if facts.pooling.labels else "embed")
    if task in ("classify", "score"):
        _judge_head(task, params, facts)
        probabilities: PoolingActivation = "sigmoid" if len(how.labels) == 1 else "softmax"
        return Pooling(how.kind, "none" if params.use_activation is False else probabilities, classify=True)
    if how.labels:
        raise RequestError(f"this model ({facts.architecture}) classifies: use classify or score", "task")
    if params.dimensions is not None and how.width is not None and params.dimensions > how.width:
        raise RequestError(
            f"dimensions {params.dimensions} are more than the {how.width} of this model's vectors",
            "dimensions",
        )
    normalize = how.normalize if params.use_activation is None else params.use_activation
    return Pooling(
        "all" if task == "token_embed" else how.kind,
        "normalize" if normalize else "none",
        dimensions=params.dimensions,
    )


def _judge_head(task: str, params: PoolingParams, facts: ModelFacts) -> None:
    labels = facts.pooling.labels
    if not labels:
        raise RequestError(
            f"{task} needs a model with a head that classifies, and this one ({facts.architecture}) has "
            "none; use embed",
            "task",
        )
    if task == "score" and len(labels) != 1:
        raise RequestError(
            f"score needs a model of one label, and this one has {len(labels)}; use classify", "task"
        )
    if params.dimensions is not None:
        raise RequestError(f"dimensions are those of vectors, and {task} gives scores", "dimensions")


def as_core_params(params: PoolingParams, pooling: Pooling) -> SamplingParams:
    """What of it is left for the core: a cached token's hidden state is not there any more, so where it is
    needed every token is computed."""
    skips = params.skip_reading_prefix_cache
    return SamplingParams(
        max_tokens=1,
        seed=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=pooling.kind != "last" or bool(skips),
    )


def cut(
    ids: list[int], text: str | None, params: PoolingParams, max_model_len: int, tokenizer: Tokenizer | None
) -> list[int]:
    """At most as many tokens as `truncate_prompt_tokens` says. What a tokenizer puts around a text stays.

    Raises `RequestError` for a prompt that is longer than the model can read, and not to be cut.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        if len(ids) > max_model_len:
            raise RequestError(
                f"prompt has {len(ids)} tokens, and max_model_len is {max_model_len}; shorten it, or set "
                "truncate_prompt_tokens to -1",
                "prompt",
            )
        return ids
    if keep > max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to max_model_len {max_model_len}, got {keep}",
            "truncate_prompt_tokens",
        )
    keep = max_model_len if keep == -1 else keep
    if len(ids) <= keep:
        return ids
    before, inner, after = _around(ids, text, tokenizer)
    room = keep - len(before) - len(after)
    if room < 1:
        before, inner, after, room = [], ids, [], keep
    return before + (inner[-room:] if params.truncation_side == "left" else inner[:room]) + after


def pair_prompt(
    first: object, second: object, tokenizer: Tokenizer, keep: int | None = None
) -> dict[str, list[int]]:
    """Two texts that a model reads at once: the first as it is alone, the second behind it, of the second
    kind of tokens. At most `keep` tokens, by cutting the second.

    Raises `RequestError` for what is no text.
    """
    for text in (first, second):
        if not isinstance(text, str):
            raise RequestError(f"a pair is scored by its texts; got {type(text).__name__}", "prompt")
    assert isinstance(first, str)
    assert isinstance(second, str)
    ids = tokenizer.encode(first)
    _, _, after = _around(ids, first, tokenizer)
    own = tokenizer.encode(second, add_special_tokens=False)
    if keep is not None:
        own = own[: max(0, keep - len(ids) - len(after))]
    behind = own + after
    return {"prompt_token_ids": ids + behind, "token_type_ids": [0] * len(ids) + [1] * len(behind)}


def pair_room(params: PoolingParams | None, keep: int | None, max_model_len: int) -> int | None:
    """Most tokens of a pair, where it is to be cut; None: it is not."""
    keep = params.truncate_prompt_tokens if keep is None and params is not None else keep
    return max_model_len if keep == -1 else keep


def of_kinds(ids: list[int], kinds: object, facts: ModelFacts) -> list[int]:
    """Ids as the network knows them: a token of the second kind stands behind the whole vocabulary.

    Raises `RequestError` for kinds that are not one for each token, or that the model does not know.
    """
    if not isinstance(kinds, list | tuple) or len(kinds) != len(ids) or not {0, 1}.issuperset(kinds):
        raise RequestError("token_type_ids must be 0 or 1 for each of prompt_token_ids", "token_type_ids")
    if facts.pooling.token_kinds < 2:
        return ids
    return [i + facts.vocab_size * kind for i, kind in zip(ids, kinds, strict=True)]


def _around(
    ids: list[int], text: str | None, tokenizer: Tokenizer | None
) -> tuple[list[int], list[int], list[int]]:
    """A text's own tokens, and those before and after it."""
    if text is not None and tokenizer is not None:
        inner = tokenizer.encode(text, add_special_tokens=False)
        for start in range(len(ids) - len(inner) + 1):
            end = start + len(inner)
            if ids[start:end] == inner:
                return ids[:start], inner, ids[end:]
    return [], ids, []


# -- what came back ------------------------------------------------------------------------------------------


def vector_of(output: RequestOutput) -> Floats:
    """Raises `EngineError` for a request that ended otherwise."""
    answer = output.outputs[0]
    if answer.pooled is None:
        raise EngineError(f"request {output.request_id} ended with {answer.finish_reason}: {answer.error}")
    return answer.pooled


def _request_output(output: RequestOutput, outputs: Pooled) -> PoolingRequestOutput[Pooled]:
    return PoolingRequestOutput(
        output.request_id, outputs, output.prompt_token_ids, output.finished, output.num_cached_tokens
    )


def as_pooling(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    return _request_output(output, PoolingOutput(vector_of(output)))


def as_embedding(output: RequestOutput) -> PoolingRequestOutput[EmbeddingOutput]:
    return _request_output(output, EmbeddingOutput(vector_of(output).tolist()))


def as_classification(output: RequestOutput) -> PoolingRequestOutput[ClassificationOutput]:
    return _request_output(output, ClassificationOutput(vector_of(output).tolist()))


def as_scoring(output: RequestOutput) -> PoolingRequestOutput[ScoringOutput]:
    return _request_output(output, ScoringOutput(float(vector_of(output)[0])))


def cosine(first: Floats, second: Floats) -> float:
    """Of two vectors of any length; 0 where one is nothing."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def of_pair(first: RequestOutput, second: RequestOutput) -> PoolingRequestOutput[ScoringOutput]:
    """How alike two texts are: the cosine of their vectors."""
    score = cosine(vector_of(first), vector_of(second))
    return PoolingRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(score),
        first.prompt_token_ids + second.prompt_token_ids,
    )
