"""How to choose tokens and when to stop: a flag for each field of `SamplingParams` that a person sets."""

from __future__ import annotations

import argparse
import typing

from mainspring.base.params import SamplingParams
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_flag

HELP = {
    "max_tokens": "most tokens to write",
    "temperature": "0: always the likeliest token; higher: more varied",
    "top_p": "choose among the likeliest tokens that together have this probability",
    "top_k": "choose among this many likeliest tokens; 0: all",
    "min_p": "drop tokens less likely than this share of the likeliest",
    "stop": "end where this text would appear; may be repeated",
    "stop_token_ids": "tokens that end the text",
    "ignore_eos": "go on when the model wants to end",
    "min_tokens": "do not end before so many",
    "presence_penalty": "against tokens already written, -2 to 2",
    "frequency_penalty": "the same, for each time they were written",
    "repetition_penalty": "against tokens in prompt or text, above 1",
    "logit_bias": "added to the logits of token ids",
    "allowed_token_ids": "choose among these tokens only",
    "bad_words": "never write this; may be repeated",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "show the stop text that ended it",
}
EVERYDAY = ("max_tokens", "temperature", "top_p", "top_k", "stop")
# Where a person's first impression wants other values than an API's defaults.
DEFAULTS = {"max_tokens": 256, "temperature": 0.7, "top_p": 0.95}


def add_sampling_flags(parser: Parser) -> None:
    group = parser.add_argument_group("choosing tokens")
    hints = typing.get_type_hints(SamplingParams)
    for name, help in HELP.items():
        if name in DEFAULTS:
            help += f" (default: {DEFAULTS[name]})"
        shown = name in EVERYDAY or parser.show_all
        add_flag(group, name, hints[name], help if shown else argparse.SUPPRESS)


def unasked_limit(given: argparse.Namespace) -> int | None:
    """The length at which an answer is cut because nothing was said of it."""
    return None if hasattr(given, "max_tokens") else int(DEFAULTS["max_tokens"])


def sampling_params(given: argparse.Namespace) -> SamplingParams:
    """Raises `RequestError` for values that can never be right."""
    chosen = {name: getattr(given, name) for name in HELP if hasattr(given, name)}
    return SamplingParams(**(DEFAULTS | chosen))
