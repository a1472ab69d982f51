"""BERT-shaped encoders: every token sees every other, norms stand behind each sum, there is no head.

MiniLM, BGE, E5, GTE and others. A text is of one piece, so the row of the first kind of token is added to
every token. Where a head classifies (`models/classifier.py`) there may be a second text, whose tokens are of
the second kind: they are further rows of the table of embeddings, behind all others, from which the
difference of the kinds was made part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mainspring.models.classifier import SCORES
from mainspring.models.families.file import ModelFile
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec
from mainspring.models.views import View

GGUF_NAMES: Final = {
    "positions": "position_embd",
    "embedding_norm": "token_embd_norm",
    "attn_post_norm": "blk.{}.attn_output_norm",
    "mlp_post_norm": "blk.{}.layer_output_norm",
}
CONFIG_NAMES: Final = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "wq": "encoder.layer.{}.attention.self.query",
    "wk": "encoder.layer.{}.attention.self.key",
    "wv": "encoder.layer.{}.attention.self.value",
    "wo": "encoder.layer.{}.attention.output.dense",
    "attn_post_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "w_up": "encoder.layer.{}.intermediate.dense",
    "w_down": "encoder.layer.{}.output.dense",
    "mlp_post_norm": "encoder.layer.{}.output.LayerNorm",
}
GGUF_KINDS, CONFIG_KINDS = "token_types", "embeddings.token_type_embeddings"
# Of a checkpoint, what no embedding needs: heads (see `models/classifier.py`), and positions counted.
UNUSED: Final = ("pooler.", "classifier.", "cls.", "embeddings.position_ids")


def bert(file: ModelFile) -> Model:
    keys = file.keys
    prefix, num_kinds = "", 1
    if file.is_gguf:
        keys.one_of("attention.causal", (False,), False)
        keys.get("pooling_type")  # of hidden states: not of the network
        file = file.with_names(GGUF_NAMES)
    else:
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in file.tensors else ""
        file = file.with_names({role: prefix + name for role, name in CONFIG_NAMES.items()})
        keys.one_of("hidden_act", ("gelu",), "gelu")
        keys.one_of("position_embedding_type", ("absolute",), "absolute")
        known_kinds = keys.count("type_vocab_size", 2)
        num_kinds = min(2, known_kinds) if f"{SCORES}.weight" in file.tensors else 1
    num_heads, num_kv_heads, head_size = file.heads()
    attn = AttnSpec(num_heads, num_kv_heads, head_size, None, qkv_bias=True, out_bias=True, causal=False)
    mlp = MLPSpec(keys.count("intermediate_size"), "gelu", gated=False, bias=True)
    kinds = GGUF_KINDS if file.is_gguf else prefix + CONFIG_KINDS
    views = {f"{kinds}.0": View(f"{kinds}.weight", 0, 1, flat=True)}
    if num_kinds == 2:
        words = file.names["embedding"] + ".weight"
        views[words] = View(words, second_kind=f"{kinds}.weight")
    model = file.with_names({"embedding.bias": f"{kinds}.0"}).model(
        "bert",
        [LayerSpec(attn, mlp, norms="sum")] * file.num_layers(),
        norm=file.norm("layer_norm_eps", None if file.is_gguf else 1e-12),
        tied=False,
        views=views,
        ignored=frozenset(name for name in file.tensors if _is_unused(name.removeprefix(prefix))),
        embedding_bias=True,
        embedding_norm=True,
        num_positions=keys.count("max_position_embeddings"),
        output_norm=False,
        has_head=False,
    )
    return replace(model, spec=replace(model.spec, vocab_size=num_kinds * model.spec.vocab_size))


def _is_unused(name: str) -> bool:
    return name.startswith(UNUSED)
