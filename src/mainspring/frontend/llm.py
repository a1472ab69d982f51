"""The library's front door: prompts in, answers out, in the same order.

Every call adds its requests, steps the engine until they are done, and leaves nothing behind, however it
ends: what is not finished when the call is left (an error, Ctrl-C, a closed iterator) is aborted.

Calls may come from several threads. Whoever waits steps the engine for all, one at a time, and each output
goes to the inbox of the call it belongs to; so calls share batches, and a caller who is slow to read delays
nobody.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError, EngineError, RequestError
from mainspring.base.messages import IsPaused, Profile, SchedulerStats
from mainspring.base.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from mainspring.base.params import PoolingParams, PoolingTask, RequestOutputKind, SamplingParams
from mainspring.frontend.bounds import after_reasoning
from mainspring.frontend.input_processor import Prompt
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.manner import manner_of
from mainspring.frontend.parsing.constraints import forced
from mainspring.frontend.pooling import (
    as_classification,
    as_embedding,
    as_pooling,
    as_scoring,
    of_pair,
    pair_prompt,
    pair_room,
)
from mainspring.frontend.reasoning import Opening, opening
from mainspring.frontend.tools import ToolUse, judged_tools

if TYPE_CHECKING:
    from mainspring.frontend.chat_template import ChatTemplate
    from mainspring.frontend.metrics import Metric
    from mainspring.frontend.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]
MakeBar = Callable[..., Any]  # makes a progress bar, as tqdm does


class _Call:
    """The requests of one call that are not finished, and what came for them and was not read."""

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self.inbox: deque[RequestOutput] = deque()


class _Turns:
    """A lock that goes to whoever has waited longest: a plain one goes back, nearly always, to the thread
    that steps, and a new call would wait until an old one is done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # the first of them has the turn

    def __enter__(self) -> None:
        me = object()
        with self._changed:
            self._queue.append(me)
            try:
                self._changed.wait_for(lambda: self._queue[0] is me)
            except BaseException:  # Ctrl-C: leave the queue, or everybody behind waits for ever
                self._queue.remove(me)
                self._changed.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()


class LLM:
    """A model, ready to answer.

    `model` is a name of the catalogue (fetched on first use) or the path of a GGUF file; everything else is
    a field of `EngineArgs`, by name. Raises `ConfigError` for settings, `CheckpointError` for the model's
    file.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **engine_args: Any) -> None:
        if model is not None:
            engine_args["model"] = model
        args = EngineArgs.from_mapping(engine_args)
        self._set_up(LLMEngine.from_engine_args(args), args.chat_template)

    @classmethod
    def from_engine(cls, engine: LLMEngine, chat_template: str | None = None) -> LLM:
        """Around an engine that is there already."""
        llm = cls.__new__(cls)
        llm._set_up(engine, chat_template)
        return llm

    def _set_up(self, engine: LLMEngine, chat_template: str | None) -> None:
        self.llm_engine = engine
        self._chat_template = chat_template
        self._templates: dict[str | None, ChatTemplate] = {}
        self._turn = _Turns()  # held around every use of the engine
        self._request_ids = map(str, itertools.count())  # never used twice, also not after a failed call
        self._calls: dict[str, _Call] = {}  # by request id

    # --- answers --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: object = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: text, a list of token ids, or a mapping (see `Prompt`).

        `sampling_params` is one for all or one for each, likewise `priority` (smaller is served first).
        `use_tqdm` shows progress; a callable makes the bar. Returns the finished outputs in the order of
        the prompts.

        Raises `RequestError` if any prompt or parameter cannot be served; then none of them is.
        """
        if lora_request is not None:
            raise RequestError("lora_request is not supported yet; leave it out", "lora_request")
        asked = _as_list(prompts)
        params = _one_each(len(asked), "sampling_params", sampling_params, self.get_default_sampling_params())
        priorities = _one_each(len(asked), "priority", priority, 0)
        return self._finished(
            asked, [_with_kind(one, RequestOutputKind.FINAL_ONLY) for one in params], priorities, use_tqdm
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of {"role": ..., "content": ...}.

        `chat_template` is a template or its file, instead of the model's. `continue_final_message` goes on
        with the last message instead of beginning a new one; then `add_generation_prompt` must be False.

        `tools` are shown to the model by the template (see `frontend/tools.py`). With `tool_choice` the
        answer, after its reasoning if there is any, is a call and nothing else: the arguments of the tool
        that is named, as JSON; or, for "required", a list of {"name": ..., "parameters": ...}. Other answers
        are as the model writes them; `frontend/parsing` reads them.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages must be a list of messages, or of conversations, got {type(messages).__name__}",
                "messages",
            )
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        use = judged_tools(tools, tool_choice)
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=use.tools or None,
            )
            for conversation in conversations
        ]
        if use.is_forced:
            given = sampling_params or self.get_default_sampling_params()
            form = manner_of(self._template(chat_template).source).reasoning_format
            begun = [chat[-1].get("content") if continue_final_message else None for chat in conversations]
            sampling_params = [
                _forced(params, use, opening(form, prompt["prompt"], said))
                for params, prompt, said in zip(
                    _one_each(len(prompts), "sampling_params", given, None), prompts, begun, strict=True
                )
            ]
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt; yields what is new (`RequestOutputKind.DELTA`) until an output is finished.

        Closing the iterator aborts the request. A chat is streamed by
        `generate_stream(llm.chat_prompt(messages))`.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        with self._call() as call:
            self._add(call, prompt, _with_kind(params, RequestOutputKind.DELTA), priority)
            yield from self._outputs(call)

    def chat_prompt(
        self,
        messages: Any,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The prompt that `chat` sends for one conversation: {"prompt": text, "prompt_token_ids": ids}."""
        tokenizer = self.get_tokenizer()
        template = self._template(chat_template)
        given = (messages, add_generation_prompt, continue_final_message)
        options = dict(chat_template_kwargs or {})
        if taken := options.keys() & {
            "messages",
            "tokenizer",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
        }:
            raise RequestError(
                f"chat_template_kwargs has {', '.join(sorted(taken))}, which are arguments of their own",
                "chat_template_kwargs",
            )
        if known := judged_tools(tools).tools:
            options["tools"] = list(known)
        text = template.render(*given, **options)
        self.llm_engine.judge_length(text)
        return {
            "prompt": text,
            "prompt_token_ids": template.encode(tokenizer, *given, **options),
        }

    def chat_opening(self, prompt: Mapping[str, Any]) -> Opening:
        """How the answer to a prompt of `chat_prompt` may begin: with reasoning, and in which form."""
        return opening(manner_of(self._template(None).source).reasoning_format, prompt["prompt"])

    # --- vectors --------------------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in their order: `output.outputs.embedding`.

        How it is pooled, and whether its length is made 1, is as the model's files say; a model that
        generates gives the last token's state, of length 1. `truncate_prompt_tokens` cuts longer prompts, -1
        to what the model can read. Raises `RequestError` if any prompt cannot be served; then none of them
        is.
        """
        params = self._pooling_params("embed", prompts, pooling_params, truncate_prompt_tokens)
        return [as_embedding(output) for output in self._pooled(prompts, params, use_tqdm)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the task gives, as an array: `output.outputs.data`. By default a vector for each token."""
        task = pooling_task or "token_embed"
        params = self._pooling_params(task, prompts, pooling_params, truncate_prompt_tokens)
        return [as_pooling(output) for output in self._pooled(prompts, params, use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels of the model's head: `output.outputs.probs`."""
        params = self._pooling_params("classify", prompts, pooling_params, truncate_prompt_tokens)
        return [as_classification(output) for output in self._pooled(prompts, params, use_tqdm)]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        use_tqdm: bool | MakeBar = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with one, one with each of many, or each with its own.

        A model that was made for pairs reads both at once; else it is the cosine of their vectors.
        """
        firsts, seconds = _as_list(data_1), _as_list(data_2)
        if len(firsts) not in (1, len(seconds)) or not seconds:
            raise RequestError(
                f"data_1 has {len(firsts)} texts and data_2 {len(seconds)}; give one and some, or as many",
                "data_1",
            )
        if self.llm_engine.facts.pooling.labels:
            keep = pair_room(pooling_params, truncate_prompt_tokens, self.max_model_len)
            pairs = [
                pair_prompt(first, second, self.get_tokenizer(), keep)
                for first, second in zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
            ]
            params = self._pooling_params("score", pairs, pooling_params, None)
            return [as_scoring(output) for output in self._pooled(pairs, params, use_tqdm)]
        texts = firsts + seconds
        params = self._pooling_params("embed", texts, pooling_params, truncate_prompt_tokens)
        outputs = self._pooled(texts, params, use_tqdm)
        one_each = outputs[: len(firsts)] * (len(seconds) // len(firsts))
        return [of_pair(one, two) for one, two in zip(one_each, outputs[len(firsts) :], strict=True)]

    def _pooling_params(
        self, task: PoolingTask, prompts: Any, given: Any, truncate_prompt_tokens: int | None
    ) -> Sequence[Any]:
        """One for each prompt; the caller's objects are not changed."""
        found = []
        for one in _one_each(len(_as_list(prompts)), "pooling_params", given, PoolingParams()):
            if not isinstance(one, PoolingParams):
                raise RequestError(
                    f"pooling_params must be PoolingParams, got {type(one).__name__}", "pooling_params"
                )
            if one.task not in (None, task):
                raise RequestError(f"pooling_params are for {one.task}, and {task} was asked for", "task")
            more = (
                {} if truncate_prompt_tokens is None else {"truncate_prompt_tokens": truncate_prompt_tokens}
            )
            found.append(msgspec.structs.replace(one, task=task, **more))
        return found

    def _pooled(self, prompts: Any, params: Sequence[Any], use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        asked = _as_list(prompts)
        return self._finished(asked, params, [0] * len(asked), use_tqdm)

    # --- the engine -----------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.llm_engine.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        if self.llm_engine.tokenizer is None:
            raise ConfigError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the advice of the model's makers; a new object each time."""
        return self.llm_engine.get_default_sampling_params()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False, and no change, while requests run, unless those are to be
        computed again."""
        with self._turn:
            return self.llm_engine.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1) -> None:
        """Give memory back: the KV cache (level 1), and the weights (2), which `wake_up` reads again; level 0
        only pauses. Requests of other threads end with finish reason abort."""
        with self._turn:
            self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take back what `tags` name ("weights", "kv_cache"; None: all); once nothing is missing, requests
        are served again."""
        with self._turn:
            self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether something is not awake yet."""
        with self._turn:
            return self.llm_engine.is_sleeping()

    def start_profile(self) -> None:
        """Python's profiler, in the thread that steps the engine core."""
        with self._turn:
            self.llm_engine.call(Profile(True))

    def stop_profile(self) -> str:
        """Returns the path of the profile, a file in the core's working folder."""
        with self._turn:
            return str(self.llm_engine.call(Profile(False)))

    def get_stats(self) -> SchedulerStats:
        """Gauges of now and counters since the start."""
        with self._turn:
            return self.llm_engine.get_stats()

    def get_metrics(self) -> list[Metric]:
        """What happened so far, under vLLM's names: gauges, counters and histograms (docs/metrics.md).

        Raises `ConfigError` unless the engine was made with `disable_log_stats=False`.
        """
        with self._turn:
            return self.llm_engine.get_metrics()

    def shutdown(self) -> None:
        """Let go of the model and its memory. Idempotent; calls that still wait raise `EngineDeadError`."""
        with self._turn:
            self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- calls ----------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[_Call]:
        """A call's requests live inside the block and no longer."""
        call = _Call()
        try:
            yield call
        finally:
            with self._turn:
                self.llm_engine.abort_request(call.unfinished)
                for request_id in call.unfinished:
                    del self._calls[request_id]

    def _finished(
        self, asked: list[Any], params: Sequence[Any], priorities: Sequence[int], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        """The last output of each, in the order of what was asked."""
        with self._call() as call:
            ids = []
            for index, one in enumerate(zip(asked, params, priorities, strict=True)):
                with _says_which(index, len(asked)):
                    ids.append(self._add(call, *one))
            finished = {}
            with _progress(use_tqdm, len(asked)) as show:
                for output in self._outputs(call):
                    finished[output.request_id] = output
                    show(output)
            return [finished[i] for i in ids]

    def _add(self, call: _Call, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int) -> str:
        request_id = next(self._request_ids)
        with self._turn:
            # Known before it is added: wherever an interrupt falls, `_call` finds it.
            self._calls[request_id] = call
            call.unfinished.add(request_id)
            self.llm_engine.add_request(request_id, prompt, params, priority)
        return request_id

    def _outputs(self, call: _Call) -> Iterator[RequestOutput]:
        """What comes for `call`, until all of its requests are finished.

        Raises `EngineError` while the engine is paused: nobody may be there to wake it."""
        with self._turn:
            if call.unfinished and self.llm_engine.call(IsPaused()):
                state = "sleeps" if self.llm_engine.is_sleeping() else "is paused"
                raise EngineError(f"the engine {state} and would not answer; call wake_up() first")
        while call.unfinished or call.inbox:
            while not call.inbox:
                with self._turn:
                    if not call.inbox:  # another thread's step may have filled it meanwhile
                        self._step()
            yield call.inbox.popleft()

    def _step(self) -> None:
        """One step for everybody. Held: the turn."""
        if not self.llm_engine.has_unfinished_requests() and self.llm_engine.is_alive:
            raise EngineError("requests were aborted from elsewhere while a call waited for them")
        with _interrupt_at_end():
            for output in self.llm_engine.step():
                call = self._calls.get(output.request_id)
                if call is None:
                    continue  # its call is over
                call.inbox.append(output)
                if output.finished:
                    call.unfinished.discard(output.request_id)
                    del self._calls[output.request_id]

    def _template(self, source: str | None) -> ChatTemplate:
        from mainspring.frontend.chat_template import ChatTemplate, template_text

        source = self._chat_template if source is None else source
        if source not in self._templates:
            text = None if source is None else template_text(source)
            self._templates[source] = ChatTemplate.from_tokenizer(self.get_tokenizer(), text)
        return self._templates[source]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    return list(prompts) if _is_many(prompts) else [prompts]


def _is_many(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a list of prompts; a list that begins with an integer is one prompt's ids."""
    return isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], int))


def _one_each(count: int, name: str, given: Any, default: Any) -> Sequence[Any]:
    """`given` for each of `count` prompts: one for all, or a list of as many."""
    if not isinstance(given, list | tuple):
        return [default if given is None else given] * count
    if len(given) != count:
        raise RequestError(
            f"there are {count} prompts and {len(given)} {name}; give one for each, or one for all", name
        )
    return given


@contextmanager
def _says_which(index: int, count: int) -> Iterator[None]:
    """A refusal among several prompts names the one it is about."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"prompt {index} of {count}: {error}", error.param) from None


def _forced(params: SamplingParams, use: ToolUse, begins: Opening) -> SamplingParams:
    if params.structured_outputs is not None:
        raise RequestError(
            "structured_outputs and tool_choice both say what the text must be; give one", "tool_choice"
        )
    wanted = forced(use.tools, use.tool_choice, use.parallel)
    if begins.form is not None:
        wanted = after_reasoning(wanted, begins.form, is_open=begins.is_open)
    return msgspec.structs.replace(params, structured_outputs=wanted)


def _with_kind(params: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        return params  # refused by name where all parameters are judged
    return msgspec.structs.replace(params, output_kind=kind)


@contextmanager
def _progress(use_tqdm: bool | MakeBar, total: int) -> Iterator[Callable[[RequestOutput], None]]:
    """A function to call with each finished output."""
    if not use_tqdm:
        yield lambda output: None
        return
    make_bar = use_tqdm if callable(use_tqdm) else _tqdm()
    num_read = num_written = 0
    started_s = time.monotonic()
    with make_bar(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:

        def show(output: RequestOutput) -> None:
            nonlocal num_read, num_written
            num_read += len(output.prompt_token_ids)
            num_written += sum(len(answer.token_ids) for answer in output.outputs)
            elapsed_s = max(time.monotonic() - started_s, 1e-9)
            speeds = f"input: {num_read / elapsed_s:.2f} toks/s, output: {num_written / elapsed_s:.2f} toks/s"
            bar.set_postfix_str(f"est. speed {speeds}", refresh=False)
            bar.update(1)

        yield show


def _tqdm() -> MakeBar:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm  # type: ignore[no-any-return]


@contextmanager
def _interrupt_at_end() -> Iterator[None]:
    """Ctrl-C during the block is raised when it ends, for a step that is cut short leaves the core half
    booked. A second Ctrl-C does not wait."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def note(number: int, frame: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
