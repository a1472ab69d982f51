"""GPT-2: learned positions, LayerNorm, one tensor for Q, K and V, biases everywhere.

Its checkpoints hold matrices as [inputs, outputs], and some name no `transformer.` before tensors; GGUF
files turn the matrices over.
"""

from __future__ import annotations

from typing import Final

from mainspring.models.families.file import ModelFile
from mainspring.models.families.fused import fused_rows
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec
from mainspring.models.views import View

CONFIG_KEYS: Final = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
GGUF_NAMES: Final = {"positions": "position_embd"}
CONFIG_NAMES: Final = {
    "embedding": "wte",
    "positions": "wpe",
    "output_norm": "ln_f",
    "attn_norm": "h.{}.ln_1",
    "wo": "h.{}.attn.c_proj",
    "mlp_norm": "h.{}.ln_2",
    "w_up": "h.{}.mlp.c_fc",
    "w_down": "h.{}.mlp.c_proj",
}
TURNED: Final = ("wo", "w_up", "w_down")


def gpt2(file: ModelFile) -> Model:
    keys = file.keys
    prefix = ""
    if file.is_gguf:
        file = file.with_names(GGUF_NAMES)
    else:
        keys.spelled(CONFIG_KEYS)
        prefix = "transformer." if "wte.weight" not in file.tensors else ""
        file = file.with_names({role: prefix + name for role, name in CONFIG_NAMES.items()})
        _check_config(file)
    hidden, num_layers = keys.count("hidden_size"), file.num_layers()
    num_heads, num_kv_heads, head_size = file.heads()
    attn = AttnSpec(num_heads, num_kv_heads, head_size, None, qkv_bias=True, out_bias=True)
    mlp = MLPSpec(keys.count("intermediate_size", 4 * hidden), "gelu_tanh", gated=False, bias=True)
    qkv = "blk.{}.attn_qkv" if file.is_gguf else prefix + "h.{}.attn.c_attn"
    views: dict[str, View] = {}
    for layer in range(num_layers):
        at = qkv.replace("{}", str(layer))
        for kind in ("weight", "bias"):
            parts = {f"{at}.{part}.{kind}": hidden for part in "qkv"}
            views |= fused_rows(file, f"{at}.{kind}", parts, transpose=not file.is_gguf and kind == "weight")
        if not file.is_gguf:
            turned = (f"{file.names[role]}.weight".replace("{}", str(layer)) for role in TURNED)
            views |= {name: View(name, transpose=True) for name in turned}
    num_positions = keys.count("max_position_embeddings")
    return file.with_names({f"w{part}": f"{qkv}.{part}" for part in "qkv"}).model(
        "gpt2",
        [LayerSpec(attn, mlp)] * num_layers,
        norm=file.norm("layer_norm_eps", None if file.is_gguf else 1e-5),
        tied=file.is_tied(True),
        views=views,
        ignored=_masks(file, prefix),
        num_positions=num_positions,
    )


def _check_config(file: ModelFile) -> None:
    keys = file.keys
    keys.one_of("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    keys.one_of("scale_attn_weights", (True,), True)
    keys.one_of("scale_attn_by_inverse_layer_idx", (False,), False)
    keys.get("reorder_and_upcast_attn")  # the order of a product, for half precision
    if (longest := keys.count("max_position_embeddings", 1024)) != keys.count("n_ctx", longest):
        raise keys.refusal("n_ctx", f"n_positions, {longest}")
    for key in ("n_special", "predict_special_tokens"):
        keys.get(key)  # of training
    for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"):
        keys.get(f"summary_{key}")  # of a head that is not used


def _masks(file: ModelFile, prefix: str) -> frozenset[str]:
    """Triangles that older files hold beside the weights."""
    return frozenset(
        name
        for name in file.tensors
        if name.startswith(prefix + "h.") and name.endswith((".attn.bias", ".attn.masked_bias"))
    )
