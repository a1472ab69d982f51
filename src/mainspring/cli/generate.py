"""`mainspring generate`: continue a text, as it is or through the model's chat template."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mainspring.base.errors import RequestError
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags, add_engine_flags
from mainspring.cli.sampling import add_sampling_flags, sampling_params, unasked_limit
from mainspring.cli.session import ENGINE_WORDS, answer, not_utf8, open_model, say_if_odd, standard_input
from mainspring.cli.structure import add_structure_flags, structure
from mainspring.cli.values import token_ids

EXAMPLES = (
    '--prompt "Once upon a time" --max-tokens 40',
    '--prompt "What is a mainspring?" --chat --temperature 0 --json',
    "--prompt - < letter.txt",
    '--prompt "Is the sky blue?" --chat --choice yes --choice no',
)


def run(argv: list[str]) -> int:
    given = _parser(argv).read(argv)
    params = sampling_params(given)
    params.structured_outputs = structure(given)
    prompt = _prompt(given)  # before the model: what is wrong here is wrong without it
    if getattr(given, "skip_tokenizer_init", False) and not given.json:
        raise RequestError("--skip-tokenizer-init leaves no text to show, only token ids; give --json too")
    llm = open_model(given)
    if given.chat:
        prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
    result = answer(llm, prompt, params, show=not given.json)
    if given.json:
        print(json.dumps(result.as_json()))
    if not getattr(given, "skip_tokenizer_init", False):
        say_if_odd(result, unasked_limit(given), "an instruct model may want --chat, or try another prompt")
    return 0


def _parser(argv: list[str]) -> Parser:
    parser = Parser("generate", "Continue a text. The model is fetched on first use.", EXAMPLES, argv)
    group = parser.add_argument_group("the text")
    group.add_argument("--prompt", metavar="TEXT", help="what to continue; - reads it from standard input")
    group.add_argument(
        "--prompt-token-ids", type=token_ids, metavar="IDS", help="the same, as token ids: 1,2,3"
    )
    group.add_argument(
        "--chat",
        action="store_true",
        default=False,
        help="take it as a question: apply the model's chat template",
    )
    add_sampling_flags(parser)
    add_structure_flags(parser)
    add_engine_flags(parser, words=ENGINE_WORDS)
    add_common_flags(parser)
    return parser


def _prompt(given: argparse.Namespace) -> Any:
    """Text, or `{"prompt_token_ids": [...]}`: whichever was given."""
    if hasattr(given, "prompt") and hasattr(given, "prompt_token_ids"):
        raise RequestError("give --prompt or --prompt-token-ids, not both")
    if not (hasattr(given, "prompt") or hasattr(given, "prompt_token_ids")):
        raise RequestError(
            "give --prompt TEXT, or --prompt - to read it from standard input, or --prompt-token-ids"
        )
    if hasattr(given, "prompt_token_ids"):
        if given.chat:
            raise RequestError(
                "--chat needs text: token ids are taken as they are; give --prompt or leave out --chat"
            )
        return {"prompt_token_ids": given.prompt_token_ids}
    if given.prompt != "-":
        return given.prompt
    try:
        return standard_input().buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None
