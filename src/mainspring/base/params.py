"""What a caller may ask for: sampling and pooling parameters, under the names vLLM's users know.

The rules.
1. A value that can be judged without a model is judged here, when the object is made, and refused by name.
   What needs the vocabulary or the model's length is judged by the `InputProcessor`.
2. A caller's object is never changed by the engine: `InputProcessor` works on a copy.
3. Below `GREEDY_BELOW` a temperature is greedy, and top_p, top_k and min_p are reset, for they cannot matter;
   between that and `MIN_TEMPERATURE` it is raised, since logits divided by less lose their order in float32.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal

import msgspec

from mainspring.base.errors import RequestError

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
MAX_N = 16_384  # more is a mistake or an attack: every child costs the front end memory (case B100)
MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 128
MAX_INT = 2**63 - 1  # what the core is sent
MAX_SEED = MAX_INT
LEAST_REPETITION_PENALTY = 1e-3  # less turns logits into infinities
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(IntEnum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # nothing until the end


class StructuredOutputsParams(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """What the text must look like: exactly one of the first six. Field names are vLLM's.

    Only the form is judged here. Whether it can be enforced the grammar room says (`grammar/check.py`), and
    what cannot be is refused: `lenient` is the one way around that, and then the answer says what was left
    out.

    Raises `RequestError` with the parameter `structured_outputs`.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON schema; after construction its text
    regex: str | None = None  # the whole text matches
    choice: Sequence[str] | None = None  # one of these; after construction a tuple
    grammar: str | None = None  # EBNF (`root ::= ...`) or Lark (`start: ...`)
    json_object: bool | None = None  # True: any JSON object
    structural_tag: str | dict[str, Any] | None = None  # free text with structured parts; then JSON text
    disable_any_whitespace: bool = False  # JSON without spaces and line ends
    disable_additional_properties: bool = False  # objects have no properties that the schema does not name
    whitespace_pattern: str | None = None  # a regex of what may stand between the parts of a JSON text
    lenient: bool = False  # pass over keywords of a JSON schema that cannot be enforced, and report them

    @property
    def kind(self) -> str:
        """The name of the one of the six that is set."""
        return next(name for name in STRUCTURE_KINDS if getattr(self, name) is not None)

    def __post_init__(self) -> None:
        def normalise(name: str, value: object) -> None:
            msgspec.structs.force_setattr(self, name, value)

        if self.json_object is False:
            normalise("json_object", None)
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), dict | bool):
                normalise(name, _as_json(name, value))
        if isinstance(self.choice, list):
            normalise("choice", tuple(self.choice))
        given = [name for name in STRUCTURE_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise _structure_refusal(f"set exactly one of {', '.join(STRUCTURE_KINDS)}; {found}")
        self._judge_types()

    def _judge_types(self) -> None:
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                expected = "text or a mapping" if name in ("json", "structural_tag") else "text"
                raise _structure_refusal(f"{name} must be {expected}, got {type(value).__name__}")
            if value is not None:
                check_encodable("structured_outputs", value)
        if self.choice is not None:
            if not isinstance(self.choice, tuple) or not all(isinstance(word, str) for word in self.choice):
                raise _structure_refusal("choice must be a list of texts")
            if not self.choice or "" in self.choice:
                raise _structure_refusal("choice must have at least one text, and none that is empty")
            for word in self.choice:
                check_encodable("structured_outputs", word)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties", "lenient"):
            if getattr(self, name) not in (None, True, False):
                raise _structure_refusal(f"{name} must be True or False")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _structure_refusal("disable_any_whitespace and whitespace_pattern contradict each other")


STRUCTURE_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _as_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _structure_refusal(f"{name} is not JSON: {error}") from None


def _structure_refusal(message: str) -> RequestError:
    return RequestError(f"structured_outputs: {message}", "structured_outputs")


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, dict=False):
    """How to choose tokens, when to stop, and what to report. Field names and defaults are vLLM's.

    Raises `RequestError` (a `ValueError`) that names the field for a value that can never be right.
    """

    n: int = 1  # completions per prompt
    presence_penalty: float = 0.0  # taken once from the logit of each token already in the output; [-2, 2]
    frequency_penalty: float = 0.0  # taken per occurrence in the output; [-2, 2]
    # divides positive, multiplies negative logits of tokens in prompt or output; [0.001, 1000]
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the best token's probability
    seed: int | None = None  # None or -1: the engine draws one at intake
    stop: str | list[str] | None = None  # after construction a list
    stop_token_ids: list[int] | None = None  # after construction a list
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the model's length leaves
    min_tokens: int = 0
    logprobs: int | None = None  # how many besides the sampled one; -1 is the whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int = 1  # emit the first token, then every so many, and the end
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None  # values are clamped to [-100, 100]
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None  # after construction a list
    skip_reading_prefix_cache: bool | None = None  # None: True where prompt_logprobs are asked for
    extra_args: dict[str, Any] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        self._normalise()
        self._judge_numbers()
        self._judge_lists()
        if self.is_greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def _normalise(self) -> None:
        """One form for what may be given in several."""
        self.stop = [self.stop] if isinstance(self.stop, str) else _list("stop", self.stop)
        self.stop_token_ids = _list("stop_token_ids", self.stop_token_ids)
        self.bad_words = _list("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _list("allowed_token_ids", self.allowed_token_ids)
        if self.logprobs is True or self.logprobs is False:
            self.logprobs = 1 if self.logprobs else None
        if self.prompt_logprobs is True or self.prompt_logprobs is False:
            self.prompt_logprobs = 1 if self.prompt_logprobs else None
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _refusal("logit_bias", "a mapping from token ids to numbers", self.logit_bias)
            self.logit_bias = {_bias_key(key): bias for key, bias in self.logit_bias.items()}
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise _refusal("output_kind", "a RequestOutputKind", self.output_kind) from None

    def _judge_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            LEAST_REPETITION_PENALTY,
            1 / LEAST_REPETITION_PENALTY,
        )
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, MAX_INT, "0 or -1 for off, or a positive integer")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it or raise that",
                "min_tokens",
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, -1, MAX_INT)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, -1, MAX_INT)
        _integer("stream_interval", self.stream_interval, 1, MAX_INT)
        for token, bias in (self.logit_bias or {}).items():
            _number(f"logit_bias[{token}]", bias, -math.inf, math.inf, param="logit_bias")
        if self.logit_bias:
            self.logit_bias = {
                token: min(100.0, max(-100.0, bias)) for token, bias in self.logit_bias.items()
            }

        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, "True or False", getattr(self, name))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise _refusal("structured_outputs", "StructuredOutputsParams", self.structured_outputs)
        if self.skip_reading_prefix_cache not in (None, True, False):
            raise _refusal("skip_reading_prefix_cache", "True, False or None", self.skip_reading_prefix_cache)

    def _judge_lists(self) -> None:
        if self.extra_args:
            raise RequestError(
                f"extra_args has {', '.join(map(str, self.extra_args))}, which nothing here reads",
                "extra_args",
            )
        for name in ("stop", "bad_words"):
            words = getattr(self, name)
            if not all(isinstance(word, str) for word in words):
                raise _refusal(name, "a list of strings", words)
            for word in words:
                check_encodable(name, word)
            if "" in words:
                raise RequestError(
                    f"{name} has an empty string, which would match everywhere; leave it out", name
                )
        if len(self.stop or ()) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop or ())} strings; at most {MAX_STOP_STRINGS}", "stop")
        if len(self.bad_words or ()) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(self.bad_words or ())} entries; at most {MAX_BAD_WORDS}", "bad_words"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _integer(name, token, 0, MAX_INT, "a list of token ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, which allows nothing; leave it out or name ids",
                "allowed_token_ids",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings need text, and detokenize is False; use stop_token_ids or set detokenize=True",
                "stop",
            )


PoolingKind = Literal["last", "cls", "mean", "all"]
PoolingTask = Literal["embed", "token_embed", "classify", "score"]
POOLING_TASKS = ("embed", "token_embed", "classify", "score")
TASK_ALIASES = {"encode": "token_embed", "embedding": "embed"}  # as older versions of vLLM call them


class PoolingParams(msgspec.Struct, array_like=True, omit_defaults=True):
    """What is wanted of a text that is read and not continued. Field names are vLLM's, but for truncation,
    which vLLM's callers give beside them.

    embed: a vector for the text. token_embed (encode): one for each token. classify: probabilities of the
    labels of the model's head. score: the number that a head of one label gives.

    Raises `RequestError` that names the field for a value that can never be right.
    """

    task: PoolingTask | None = None  # None: what the method that takes it does
    dimensions: int | None = None  # the first so many elements, normalised again
    # vectors of length 1, scores as probabilities; None: as the model's files say
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None  # a longer prompt is cut; -1: to what the model can read
    truncation_side: Literal["left", "right"] | None = None  # which end is cut off; None: the right one
    skip_reading_prefix_cache: bool | None = None  # None: where every token's state is needed

    def __post_init__(self) -> None:
        task = TASK_ALIASES.get(self.task, self.task) if isinstance(self.task, str) else self.task
        if task is not None and task not in POOLING_TASKS:
            raise _refusal("task", f"one of {', '.join(POOLING_TASKS)}", self.task)
        self.task = task  # type: ignore[assignment]
        if self.dimensions is not None:
            _integer("dimensions", self.dimensions, 1, MAX_INT)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_INT)
        if self.truncation_side not in (None, "left", "right"):
            raise _refusal("truncation_side", "left or right", self.truncation_side)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) not in (None, True, False):
                raise _refusal(name, "True, False or None", getattr(self, name))


def _refusal(name: str, expected: str, got: object, param: str | None = None) -> RequestError:
    try:
        shown = repr(got)
    except ValueError:  # Python writes no more digits
        shown = f"a number of more than {sys.get_int_max_str_digits()} digits"
    return RequestError(
        f"{name} must be {expected}, got {shown if len(shown) <= 60 else shown[:57] + '...'}", param or name
    )


def _number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    """Written so that NaN fails: a range check of the form `x < low` lets it through (case B110)."""
    expected = "a finite number"
    if low > -math.inf:
        expected += f" {'above' if open_low else 'of at least'} {low:g}"
    if high < math.inf:
        expected += f" and at most {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise _refusal(name, expected, value, param)
    if not (low < value if open_low else low <= value) or not value <= high:
        raise _refusal(name, expected, value, param)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _list(name: str, given: object) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list | tuple | set | frozenset):
        raise _refusal(name, "a list", given)
    return list(given)


def _bias_key(key: object) -> int:
    """A token id; JSON has it as a string of digits."""
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit():
        return int(key)
    raise _refusal("logit_bias", "a mapping from token ids to numbers", key)


def check_encodable(name: str, text: str) -> None:
    """Refuse what UTF-8 cannot say: half of a surrogate pair can never match, be hashed or be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "mend the text",
            name,
        ) from None


def _integer(name: str, value: object, low: int, high: int, expected: str | None = None) -> None:
    expected = expected or f"an integer of at least {low}"
    if high != MAX_INT or (isinstance(value, int) and value > high):
        expected += f" and at most {high}"
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refusal(name, expected, value)
