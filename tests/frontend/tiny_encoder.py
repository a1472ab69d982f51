"""A folder with a tiny random encoder, its words and how it pools: made anew from a seed wherever it is
needed, so that an independent implementation can be shown the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = "red green blue cat dog bird tree house runs sleeps sings the a and in on under over ##s ##ing"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
HIDDEN, WIDTH, LAYERS, HEADS, POSITIONS = 32, 48, 2, 2, 40
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(SPECIAL) + len(WORDS.split()),
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
TEXTS = [
    "cat",
    "the red cat sleeps under the tree",
    "a bird sings",
    "the dogs and the cats and the birds in the green house on the tree",
    "blue",
    "dog runs over the red house",
]


def write_tokenizer(folder: Path) -> None:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS.split())}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "BertTokenizer"}))


def tensors(num_labels: int) -> dict[str, Any]:
    """Of a model with a head for so many labels; 0: of the encoder alone."""
    numbers = np.random.default_rng(7)
    found: dict[str, Any] = {}

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        found[f"{name}"] = (scale * numbers.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = (1 + 0.1 * numbers.standard_normal(HIDDEN)).astype(np.float32)
        add(f"{name}.bias", HIDDEN, scale=0.1)

    def dense(name: str, outputs: int, inputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs, scale=0.1)

    add("embeddings.word_embeddings.weight", CONFIG["vocab_size"], HIDDEN, scale=1.0)
    add("embeddings.position_embeddings.weight", POSITIONS, HIDDEN)
    add("embeddings.token_type_embeddings.weight", 2, HIDDEN)
    norm("embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            dense(f"{at}attention.self.{name}", HIDDEN, HIDDEN)
        dense(f"{at}attention.output.dense", HIDDEN, HIDDEN)
        norm(f"{at}attention.output.LayerNorm")
        dense(f"{at}intermediate.dense", WIDTH, HIDDEN)
        dense(f"{at}output.dense", HIDDEN, WIDTH)
        norm(f"{at}output.LayerNorm")
    dense("pooler.dense", HIDDEN, HIDDEN)
    if not num_labels:
        return found
    found = {f"bert.{name}": values for name, values in found.items()}
    dense("classifier", num_labels, HIDDEN)
    return found


def write_encoder(
    folder: Path,
    *,
    pooling: dict[str, Any] | None = None,
    normalize: bool = True,
    max_seq_length: int | None = None,
    labels: tuple[str, ...] = (),
) -> Path:
    """pooling: of sentence-transformers' files; None: there are none. labels: of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIG)
    if labels:
        config["architectures"] = ["BertForSequenceClassification"]
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(len(labels)), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    if pooling is not None:
        prefix = "sentence_transformers.models."
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": prefix + kind}
            for i, (path, kind) in enumerate(modules[: 2 + normalize])
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if max_seq_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    return folder
