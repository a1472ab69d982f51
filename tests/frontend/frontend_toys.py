"""A tokenizer made of bytes and a few words, and a core that says what it is told to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mainspring.base.config import ModelFacts
from mainspring.base.messages import (
    Command,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    IsPaused,
    IsSleeping,
    Sleep,
    TokenLogprobs,
    WakeUp,
)
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.output_processor import OutputProcessor

BOS, EOS, END = "<bos>", "<eos>", "<end>"
WORDS = (" the", " Paris", "cST", "OPde", "STOP", "hello", " hello", "ab", "aab")


class ToyTokenizer:
    """Ids 0 to 255 are bytes, then words, then special tokens. The longest word wins; no BOS unless asked
    for."""

    adds_space = False

    def __init__(self, words: Sequence[str] = WORDS, *, add_bos: bool = False) -> None:
        specials = (BOS, EOS, END)
        self._pieces = [bytes([i]) for i in range(256)] + [word.encode() for word in (*words, *specials)]
        self.vocab_size = len(self._pieces)
        self._special = {text: self.vocab_size - len(specials) + i for i, text in enumerate(specials)}
        self.special_ids = frozenset(self._special.values())
        self.bos_token_id, self.eos_token_id = self._special[BOS], self._special[EOS]
        self.eos_token_ids = (self.eos_token_id, self._special[END])
        self.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        self._add_bos = add_bos
        self._longest_first = sorted(range(self.vocab_size), key=lambda i: (-len(self._pieces[i]), i))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            found = next(i for i in self._longest_first if rest.startswith(self._pieces[i]))
            ids.append(found)
            rest = rest[len(self._pieces[found]) :]
        return [self.bos_token_id, *ids] if add_special_tokens and self._add_bos else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        shown = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def id_to_token(self, token_id: int) -> str:
        return self._pieces[token_id].decode("latin-1")

    def id(self, text: str) -> int:
        """Of the one token that is `text`."""
        return self._pieces.index(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text) // max(map(len, self._pieces)) if len(text) > 10_000 else 0

    def encode_chat(self, rendered: str, mark: str = "") -> list[int]:
        return self.encode(rendered.replace(mark, "") if mark else rendered)

    def mark_specials(self, text: str, mark: str) -> str:
        return text


TOY = ToyTokenizer()
FACTS = ModelFacts(
    path="",
    architecture="toy",
    max_position_embeddings=4096,
    vocab_size=TOY.vocab_size + 8,  # the head has more rows than there are tokens
    eos_token_ids=TOY.eos_token_ids,
)

Script = Callable[[EngineCoreRequest], Sequence[int]]


class ScriptedClient:
    """A core that gives each request the tokens of its script and ends it as the scheduler would.

    `chunk` is how many tokens come in one output. After the script comes the token "." for ever. A request
    that is pooled gets a vector of its length and its first token.
    """

    def __init__(
        self, script: Script | Sequence[int] = (), *, chunk: int = 1, max_model_len: int = 512
    ) -> None:
        self.script = script if callable(script) else lambda request: script
        self.chunk = chunk
        self.max_model_len = max_model_len
        self.live: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.is_asleep = False
        self.is_shut_down = False
        self.fail_with: BaseException | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        self.seen.append(request)
        self.live[request.request_id] = (request, list(request.output_token_ids))

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def get_output(self) -> EngineCoreOutputs:
        if self.fail_with is not None:
            raise self.fail_with
        return EngineCoreOutputs([self._advance(*pair) for pair in list(self.live.values())])

    def call(self, command: Command, timeout_s: float | None = None) -> object:
        match command:
            case Sleep() | WakeUp():
                self.is_asleep = isinstance(command, Sleep)
                return True
            case IsPaused() | IsSleeping():
                return self.is_asleep
        return not self.live

    def has_work(self) -> bool:
        return bool(self.live)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _advance(self, request: EngineCoreRequest, tokens: list[int]) -> EngineCoreOutput:
        if request.pooling is not None:
            del self.live[request.request_id]
            prompt = request.prompt_token_ids
            vector = np.float32([len(prompt), prompt[0]])
            return EngineCoreOutput(request.request_id, [], FinishReason.STOP, pooled=vector)
        params, script = request.sampling_params, self.script(request)
        is_first = len(tokens) == len(request.output_token_ids)
        new: list[int] = []
        reason, stop_reason = None, None
        while len(new) < self.chunk and reason is None:
            token = script[len(tokens)] if len(tokens) < len(script) else ord(".")
            tokens.append(token)
            new.append(token)
            may_stop = len(tokens) > params.min_tokens
            if may_stop and token == request.eos_token_id:
                reason = FinishReason.STOP
            elif may_stop and token in request.stop_token_ids:
                reason, stop_reason = FinishReason.STOP, token
            elif len(tokens) >= params.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            del self.live[request.request_id]
        return EngineCoreOutput(
            request.request_id,
            new,
            reason,
            stop_reason,
            None if params.logprobs is None else logprobs_of(new, params.logprobs),
            self._prompt_logprobs(request) if is_first else None,
            num_cached_tokens=0 if is_first else None,
        )

    def _prompt_logprobs(self, request: EngineCoreRequest) -> TokenLogprobs | None:
        wanted = request.sampling_params.prompt_logprobs
        rest = request.prompt_token_ids[1:]
        return None if wanted is None or not rest else logprobs_of(rest, wanted)


def logprobs_of(token_ids: Sequence[int], num: int) -> TokenLogprobs:
    """Made up, and different for every token: `num` bytes after it, which are better than it."""
    columns = np.array([[t, *((t + 1 + j) % 256 for j in range(num))] for t in token_ids], np.int32)
    values = -columns.astype(np.float32) / 64 - 0.5
    return TokenLogprobs(columns.reshape(-1, num + 1), values, np.full(len(token_ids), num + 1, np.int32))


def make_engine(client: ScriptedClient, *, tokenizer: ToyTokenizer | None = TOY, **settings) -> LLMEngine:
    log_stats = settings.pop("log_stats", False)
    inputs = InputProcessor(FACTS, client.max_model_len, tokenizer, **settings)
    return LLMEngine(client, inputs, OutputProcessor(tokenizer, log_stats=log_stats), tokenizer)


def run(engine: LLMEngine) -> list:
    """Step until everything is finished; all outputs in order."""
    outputs = []
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError("a request never ends")
