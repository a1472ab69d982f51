"""`mainspring run-batch`: a file of requests answered without a server (see `server/batch.py` for its form).

The file is read twice: to count its lines, and to answer them; standard input is kept in a temporary file for
that. What is wrong with the files is said before the model is loaded; which requests failed, at the end. A
file that was read to its end is done, whatever was answered; with `--strict` a failed request is a failure.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from mainspring.base.config import EngineArgs
from mainspring.base.errors import EngineError, RequestError
from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags, add_engine_flags, engine_arguments, log_level
from mainspring.cli.serve import add_server_flags
from mainspring.cli.session import say, standard_input
from mainspring.server.settings import ServerSettings

if TYPE_CHECKING:
    from mainspring.server.batch import Tally

EXAMPLES = (
    "-i requests.jsonl -o answers.jsonl --model smollm2-135m",
    "-i requests.jsonl -o answers.jsonl --resume",
    "-i - -o - < requests.jsonl > answers.jsonl",
)
STREAM = "-"  # standard input, or output
SHOWN = 3  # requests that failed, by name
# of the server's settings: what changes an answer
SETTINGS = (
    *("served_model_name", "response_role", "trust_request_chat_template", "default_chat_template_kwargs"),
    *("override_generation_config", "return_tokens_as_token_ids", "enable_prompt_tokens_details"),
)


def run(argv: list[str]) -> int:
    given = _parser(argv).read(argv)
    for flag, name in (("-i", "input_file"), ("-o", "output_file")):
        if not hasattr(given, name):
            raise RequestError(f"give {flag} FILE, or {flag} - for a standard stream")
    if given.output_file == STREAM and (given.resume or given.json):
        flag = "--resume" if given.resume else "--json"
        raise RequestError(f"{flag} needs a file: give -o FILE")
    set_up_logging(log_level(given))
    with _requests(given.input_file) as requests, _answers(given, requests) as (answers, answered):
        return _run(given, requests, answers, answered)


def _parser(argv: list[str]) -> Parser:
    parser = Parser("run-batch", "Answer the requests of a file, in OpenAI's batch format.", EXAMPLES, argv)
    group = parser.add_argument_group("the batch")
    group.add_argument(
        "--input-file", "-i", metavar="FILE", help="requests, a JSON object a line; -: standard input"
    )
    group.add_argument("--output-file", "-o", metavar="FILE", help="answers; -: standard output")
    group.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="leave out what has an answer in the output file, and add the others",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        default=False,
        help="exit status 1 where a request was answered with an error",
    )
    add_server_flags(parser, only=SETTINGS)
    add_engine_flags(parser, without=("served_model_name",))
    add_common_flags(parser)
    return parser


# --- the files ----------------------------------------------------------------------------------------------


@contextmanager
def _requests(path: str) -> Iterator[IO[bytes]]:
    if path != STREAM:
        with _opened(path, "rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as kept:
        shutil.copyfileobj(standard_input().buffer, kept)
        yield kept


@contextmanager
def _answers(given: Namespace, requests: IO[bytes]) -> Iterator[tuple[IO[bytes], set[str]]]:
    """The file to write to, at its end, and whose answers it has."""
    if given.output_file == STREAM:
        yield sys.stdout.buffer, set()
        return
    path = Path(given.output_file)
    if path.exists() and os.path.samestat(path.stat(), os.fstat(requests.fileno())):
        raise RequestError(f"{path} is the input file too; give another -o FILE")
    with _opened(str(path), "r+b" if given.resume and path.exists() else "wb") as file:
        yield file, _kept(file, path) if given.resume else set()


def _opened(path: str, mode: str) -> IO[bytes]:
    try:
        return open(path, mode)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def _kept(file: IO[bytes], path: Path) -> set[str]:
    """Whose answers an earlier run has written; leaves `file` at its end. A last line that was cut off when
    that run ended is removed."""
    from mainspring.server.batch import answered_ids

    end = 0

    def whole() -> Iterator[bytes]:
        nonlocal end
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield line

    try:
        found = answered_ids(whole())
    except RequestError as error:
        raise RequestError(f"{path}: {error}; give another -o FILE, or leave out --resume") from None
    file.seek(end)
    file.truncate()
    return found


class _Answer(msgspec.Struct):
    """What says whether a request failed, and which."""

    custom_id: str | None
    error: dict[str, Any] | None

    def where(self) -> str:
        """Errors of lines that say no custom_id begin with their line."""
        if self.custom_id is None:
            assert self.error is not None
            return str(self.error["message"]).split(":")[0]
        return ascii(self.custom_id[:40])


class _Output:
    """Writes answers, and knows where the first failures are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failed: list[str] = []

    def write(self, line: bytes) -> None:
        try:
            self._file.write(line)
            self._file.flush()
        except BrokenPipeError:
            raise  # who read it has left
        except OSError as error:
            raise EngineError(f"the answers cannot be written: {error.strerror}; --resume goes on") from None
        if len(self.failed) < SHOWN and (answer := msgspec.json.decode(line, type=_Answer)).error:
            self.failed.append(answer.where())


# --- the run ------------------------------------------------------------------------------------------------


def _run(given: Namespace, requests: IO[bytes], answers: IO[bytes], answered: set[str]) -> int:
    settings = {name: getattr(given, name) for name in SETTINGS if hasattr(given, name)}
    args = EngineArgs.from_mapping(engine_arguments(given))
    total = sum(1 for line in requests if line.strip())
    requests.seek(0)
    output = _Output(answers)
    tally = asyncio.run(
        _serve(
            args,
            ServerSettings(**settings, disable_uvicorn_access_log=True),
            requests,
            output,
            answered,
            total,
        )
    )
    if given.json:
        print(json.dumps({"num_requests": total, **tally._asdict(), "output_file": given.output_file}))
    say(_words(tally, output.failed))
    return 1 if given.strict and tally.num_refused else 0


async def _serve(
    args: EngineArgs,
    settings: ServerSettings,
    requests: IO[bytes],
    output: _Output,
    answered: set[str],
    total: int,
) -> Tally:
    """The bar is for a person at the terminal; who interrupts is told how to go on."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from mainspring.frontend.async_llm import AsyncLLM
    from mainspring.frontend.chat_template import template_text
    from mainspring.server.batch import AT_ONCE, Batch
    from mainspring.server.run import template_for
    from mainspring.server.service import Service

    given_template = None if args.chat_template is None else template_text(args.chat_template)
    service = Service(settings, args.model)
    batch = Batch(service, output.write, answered)
    async with await AsyncLLM.launch(args) as llm:
        service.set_ready(llm, template_for(llm, given_template))
        with tqdm(total=total, unit="request", disable=None) as bar:
            num_at_once = max(AT_ONCE, 2 * (args.max_num_seqs or 0))
            try:
                return await batch.run(requests, num_at_once, bar.update)
            except BaseException:
                so_far = _words(batch.tally, output.failed)
                say(f"ended early: {so_far} of {total}; --resume goes on with the rest")
                raise


def _words(tally: Tally, failed: list[str]) -> str:
    words = f"{tally.num_answered} answered"
    if tally.num_refused:
        more = ", ..." if tally.num_refused > len(failed) else ""
        words += f", {tally.num_refused} of them with an error: {', '.join(failed)}{more}"
    if tally.num_skipped:
        words += f", {tally.num_skipped} were answered before"
    return words
