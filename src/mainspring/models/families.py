"""Adapters: what a model file says of itself -> `ModelSpec` and the names of its tensors.

A key that changes the mathematics and is not understood is an error: a model that answers wrongly is worse
than one that does not load. So each adapter lists the keys it reads and the values of other keys that change
nothing, and refuses the rest by name and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.architectures import ARCHITECTURES, check_architecture
from mainspring.checkpoint.quoting import MAX_QUOTED, quoted
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec, ModelSpec, RopeSpec


class TensorInfo(Protocol):
    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, rows first."""

    @property
    def type(self) -> str: ...


class TensorSource(Protocol):
    """Where tensors come from; `checkpoint.gguf.GGUFFile` is one."""

    @property
    def tensor_names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def dequantise(self, name: str, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """The values as float32 in `info(name).shape`, into `out` if given."""

    def dequantise_rows(self, name: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Rows [begin, end) of a matrix as float32."""

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as the file has them."""

    def is_finite(self, name: str) -> bool:
        """Whether all values are numbers, neither NaN nor infinite."""

    def drop_pages(self) -> None:
        """What was read need not stay in memory."""


class Model(NamedTuple):
    spec: ModelSpec
    names: dict[str, str]  # role -> tensor of the file


# ---------------------------------------------------------------------------------------------------------
# GGUF
# ---------------------------------------------------------------------------------------------------------

LLAMA_READ = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    }
)
LLAMA_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0, 0.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
}
LLAMA_NAMES: Mapping[str, str] = {
    "attn_norm": "attn_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "w_gate": "ffn_gate",
    "w_up": "ffn_up",
    "w_down": "ffn_down",
}


def from_gguf(metadata: Mapping[str, Any], source: TensorSource) -> Model:
    """Raises `CheckpointError`, one line, for an architecture or a key that is not supported."""
    return GGUF_FAMILIES[check_architecture(metadata)](metadata, source)


def _llama(metadata: Mapping[str, Any], source: TensorSource) -> Model:
    """Llama 2 and 3, SmolLM2, Mistral without a window. Rows of Q and K are ordered for interleaved pairs."""
    keys = _Keys(metadata, "llama.")
    keys.refuse_unknown(LLAMA_READ, LLAMA_NEUTRAL)
    tensors = set(source.tensor_names)
    num_layers = keys.count("block_count")
    if num_layers > (held := _num_layers(tensors)):  # before anything is made of that size
        raise keys.refusal("block_count", f"at most {held}, the layers that have tensors in the file")
    num_heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    if "attention.key_length" not in keys and hidden % num_heads:
        raise keys.refusal("attention.head_count", f"a divisor of embedding_length {hidden}")
    head_size = keys.count("attention.key_length", hidden // num_heads)
    if keys.count("attention.value_length", head_size) != head_size:
        raise keys.refusal("attention.value_length", f"key_length, {head_size}")
    num_kv_heads = keys.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refusal("attention.head_count_kv", f"a divisor of head_count {num_heads}")
    rotary_dim = keys.count("rope.dimension_count", head_size)
    if rotary_dim > head_size or rotary_dim % 2:
        raise keys.refusal("rope.dimension_count", f"an even number up to the head size {head_size}")
    rope = RopeSpec(
        rotary_dim,
        keys.positive("rope.freq_base", 10_000.0),
        interleaved=True,
        has_factors="rope_freqs.weight" in tensors,
    )
    layer = LayerSpec(
        AttnSpec(num_heads, num_kv_heads, head_size, rope), MLPSpec(keys.count("feed_forward_length"))
    )
    spec = ModelSpec(
        architecture="llama",
        vocab_size=_vocabulary(keys, source, tensors),
        hidden_size=hidden,
        max_position_embeddings=keys.count("context_length"),
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        layers=(layer,) * num_layers,
        tied_embeddings="output.weight" not in tensors,
    )
    names = {
        f"layers.{i}.{role}": f"blk.{i}.{name}.weight"
        for i in range(num_layers)
        for role, name in LLAMA_NAMES.items()
    }
    names |= {"embedding": "token_embd.weight", "output_norm": "output_norm.weight", "head": "output.weight"}
    names["rope_factors"] = "rope_freqs.weight"
    return Model(spec, names)


def _num_layers(tensors: set[str]) -> int:
    """How many layers have a tensor in the file, whatever it is."""
    return len({name.split(".", 2)[1] for name in tensors if name.startswith("blk.")})


def _vocabulary(keys: _Keys, source: TensorSource, tensors: set[str]) -> int:
    """Rows of the embedding, which the key and the tokens of the file must agree with."""
    if "token_embd.weight" not in tensors:
        raise CheckpointError("tensor 'token_embd.weight' is missing")
    shape = source.info("token_embd.weight").shape
    if len(shape) != 2:
        raise CheckpointError(f"tensor 'token_embd.weight' has shape {list(shape)}, expected two dimensions")
    if keys.count("vocab_size", shape[0]) != shape[0]:
        raise keys.refusal("vocab_size", f"{shape[0]}, the rows of token_embd.weight")
    return shape[0]


GGUF_FAMILIES = {"llama": _llama}
assert set(GGUF_FAMILIES) == set(ARCHITECTURES)


class _Keys:
    """A family's own metadata: keys without their prefix, values of the type that is asked for."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._prefix = prefix
        self._values = {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def refuse_unknown(self, read: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
        for key, value in self._values.items():
            if key not in read and value not in neutral.get(key, ()):
                raise CheckpointError(
                    f"{self._shown(key)} is {quoted(value)}: not supported, may change the mathematics"
                )

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "a positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
            raise self.refusal(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def refusal(self, key: str, expected: str) -> CheckpointError:
        found = f"is {quoted(self._values[key])}" if key in self._values else "is missing"
        return CheckpointError(f"{self._shown(key)} {found}; expected {expected}")

    def _shown(self, key: str) -> str:
        name = self._prefix + key
        return name if name.isprintable() and len(name) <= MAX_QUOTED else quoted(name)


# ---------------------------------------------------------------------------------------------------------
# a config alone, for random weights
# ---------------------------------------------------------------------------------------------------------

CONFIG_READ = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "sliding_window",
        "layer_types",
        # What follows changes no logit.
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
CONFIG_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "rope_scaling": (None,),
}
MAX_LAYERS = 10_000  # that a config may ask for: no file bounds it
LAYER_TYPES = ("full_attention", "sliding_attention")


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """A llama from a config of the usual keys: for `load_format` dummy, so layers may also be given windows.

    Raises `CheckpointError` naming the key that is missing, wrong or unknown.
    """
    keys = _Keys(config)
    keys.refuse_unknown(CONFIG_READ, CONFIG_NEUTRAL)
    if keys.get("model_type", "llama") != "llama":
        raise keys.refusal("model_type", "llama")
    num_heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    num_kv_heads = keys.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refusal("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    head_size = keys.count("head_dim", hidden // num_heads)
    if head_size % 2:
        raise keys.refusal("head_dim", "an even number: elements of a head turn in pairs")
    window = keys.count("sliding_window") if keys.get("sliding_window") is not None else None
    rope = RopeSpec(head_size, keys.positive("rope_theta", 10_000.0), interleaved=False)
    mlp = MLPSpec(keys.count("intermediate_size"))

    def layer(kind: str) -> LayerSpec:
        if kind not in LAYER_TYPES or (kind == "sliding_attention" and window is None):
            raise keys.refusal(
                "layer_types", f"{' or '.join(LAYER_TYPES)} per layer, the second with a sliding_window"
            )
        return LayerSpec(
            AttnSpec(
                num_heads, num_kv_heads, head_size, rope, window if kind == "sliding_attention" else None
            ),
            mlp,
        )

    num_layers = keys.count("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise keys.refusal("num_hidden_layers", f"at most {MAX_LAYERS}")
    kinds = keys.get("layer_types", [LAYER_TYPES[window is not None]] * num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.refusal("layer_types", f"a list of num_hidden_layers, {num_layers}")
    return ModelSpec(
        architecture="llama",
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=keys.count("max_position_embeddings", 2048),
        norm_eps=keys.positive("rms_norm_eps", 1e-5),
        layers=tuple(layer(kind) for kind in kinds),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
    )
