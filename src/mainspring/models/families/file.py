"""A model's file as adapters see it: keys by one name and tensors by role, whatever its form; and the pieces
of a spec that most families read alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mainspring.base.errors import CheckpointError
from mainspring.models.families.keys import Keys
from mainspring.models.families.model import Model, names_of
from mainspring.models.families.names import CONFIG_NAMES, GGUF_NAMES
from mainspring.models.spec import AttnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from mainspring.models.views import TensorSource, View

MAX_LAYERS = 10_000  # that a config alone may ask for: no file bounds it
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ModelFile:
    """Keys, and tensors where there are any: a config alone is for random weights.

    `max_model_len`: the longest request that will be asked for, where that is known: some families turn
    positions otherwise for long ones.
    """

    keys: Keys
    source: TensorSource | None
    is_gguf: bool
    max_model_len: int | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)

    def with_names(self, names: Mapping[str, str]) -> ModelFile:
        """Where this family's names of tensors differ from those of `names.py`."""
        return replace(self, own_names={**self.own_names, **names})

    @property
    def tensors(self) -> frozenset[str]:
        return frozenset(self.source.tensor_names) if self.source is not None else frozenset()

    @property
    def names(self) -> Mapping[str, str]:
        return {**(GGUF_NAMES if self.is_gguf else CONFIG_NAMES), **self.own_names}

    # Pieces of a spec.

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and the size of one."""
        keys = self.keys
        num_heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
        if "head_dim" not in keys and hidden % num_heads:
            raise keys.refusal("num_attention_heads", f"a divisor of {keys.shown('hidden_size')}, {hidden}")
        head_size = keys.count("head_dim", hidden // num_heads)
        if head_size % 2:
            raise keys.refusal("head_dim", "an even number: elements of a head turn in pairs")
        if self.is_gguf and keys.count("value_head_dim", head_size) != head_size:
            raise keys.refusal("value_head_dim", f"key_length, {head_size}")
        num_kv_heads = keys.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise keys.refusal(
                "num_key_value_heads", f"a divisor of {keys.shown('num_attention_heads')}, {num_heads}"
            )
        return num_heads, num_kv_heads, head_size

    def rope(
        self,
        head_size: int,
        *,
        interleaved: bool = False,
        theta: float = 10_000.0,
        layer_type: str = "full_attention",
    ) -> RopeSpec:
        """With the scaling that a config names. interleaved: the order of rows of Q and K. theta: where the
        file does not say. layer_type: of which layers, where a config has several."""
        keys = self.keys
        if not self.is_gguf:
            return _config_rope(self, head_size, interleaved, theta, layer_type)
        rotary_dim = keys.count("rotary_dim", head_size)
        if rotary_dim > head_size or rotary_dim % 2:
            raise keys.refusal("rotary_dim", f"an even number up to the head size {head_size}")
        return RopeSpec(
            rotary_dim,
            keys.positive("rope_theta", theta),
            interleaved,
            factors=_gguf_factors(keys, rotary_dim),
            has_factors="rope_freqs.weight" in self.tensors,
        )

    def windows(self, default: Sequence[bool] | None = None) -> list[int | None]:
        """Each layer's window. Without a list of layers' kinds in the config `default` says which have one;
        None: all, where there is a `sliding_window`."""
        window = self.window()
        return [window if has else None for has in self.windowed(default)]

    def window(self) -> int | None:
        if self.is_gguf and self.keys.get("sliding_window") == 0:
            return None
        return self.keys.count("sliding_window") if "sliding_window" in self.keys else None

    def windowed(self, default: Sequence[bool] | None = None) -> list[bool]:
        """Which layers have a window; see `windows`."""
        keys, num_layers, window = self.keys, self.num_layers(), self.window()
        kinds = keys.get("layer_types") if not self.is_gguf else None
        if kinds is None:
            has = [True] * num_layers if default is None else default
            return [one and window is not None for one in has]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise keys.refusal("layer_types", f"a list of num_hidden_layers, {num_layers}")
        for kind in kinds:
            if kind not in LAYER_TYPES or (kind == LAYER_TYPES[1] and window is None):
                raise keys.refusal(
                    "layer_types", f"{' or '.join(LAYER_TYPES)} per layer, the second with a sliding_window"
                )
        return [kind == LAYER_TYPES[1] for kind in kinds]

    def with_windows(self, attn: AttnSpec, default: Sequence[bool] | None = None) -> list[AttnSpec]:
        """`attn` for every layer, with that layer's window."""
        return [replace(attn, sliding_window=window) for window in self.windows(default)]

    def num_layers(self) -> int:
        """Raises before anything is made of a size that the file cannot have."""
        keys, num_layers = self.keys, self.keys.count("num_hidden_layers")
        if self.source is None:
            if num_layers > MAX_LAYERS:
                raise keys.refusal("num_hidden_layers", f"at most {MAX_LAYERS}")
            return num_layers
        before, _, _ = self.names["wo"].partition("{}")
        held = len({name[len(before) :].split(".", 1)[0] for name in self.tensors if name.startswith(before)})
        if num_layers > held:
            raise keys.refusal(
                "num_hidden_layers", f"at most {held}, the layers that have tensors in the file"
            )
        return num_layers

    def vocab_size(self) -> int:
        """Rows of the embedding, which the key must agree with."""
        if self.source is None:
            return self.keys.count("vocab_size")
        name = self.names["embedding"] + ".weight"
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing")
        shape = self.source.info(name).shape
        if len(shape) != 2:
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}, expected two dimensions")
        if self.keys.count("vocab_size", shape[0]) != shape[0]:
            raise self.keys.refusal("vocab_size", f"{shape[0]}, the rows of {name}")
        return shape[0]

    def is_tied(self, default: bool = False) -> bool:
        """Whether the head is the embedding. default: what configs of this family mean that do not say."""
        if self.is_gguf:
            return "output.weight" not in self.tensors
        return self.keys.flag("tie_word_embeddings", default)

    def norm(self, key: str = "rms_norm_eps", default: float | None = None) -> NormSpec:
        return NormSpec(self.keys.positive(key, default), is_layer_norm=key != "rms_norm_eps")

    def passes(self, original: int) -> bool:
        """Whether a request may be longer than the first context that a model was made for."""
        longest = self.keys.count("max_position_embeddings")
        return (longest if self.max_model_len is None else self.max_model_len) > original

    # The whole.

    def model(
        self,
        architecture: str,
        layers: Sequence[LayerSpec],
        *,
        norm: NormSpec,
        tied: bool,
        names: Mapping[str, str] | None = None,
        views: Mapping[str, View] | None = None,
        ignored: frozenset[str] = frozenset(),
        **more: Any,
    ) -> Model:
        """names: where this family's differ from those of `names.py`. more: further fields of `ModelSpec`."""
        spec = ModelSpec(
            architecture=architecture,
            vocab_size=self.vocab_size(),
            hidden_size=self.keys.count("hidden_size"),
            max_position_embeddings=self.keys.count("max_position_embeddings", 2048),
            norm=norm,
            layers=tuple(layers),
            tied_embeddings=tied,
            **more,
        )
        table = {**self.names, **(names or {})}
        if tied and not self.is_gguf:
            ignored |= {table["head"] + ".weight"}  # some files have it twice
        return Model(spec, names_of(spec, table), dict(views or {}), ignored)


def plain_attention(file: ModelFile, *, interleaved: bool = False, **more: Any) -> AttnSpec:
    """Heads that turn. more: further fields of `AttnSpec`."""
    num_heads, num_kv_heads, head_size = file.heads()
    return AttnSpec(num_heads, num_kv_heads, head_size, file.rope(head_size, interleaved=interleaved), **more)


# ---- rotary positions --------------------------------------------------------------------------------------


def _config_rope(
    file: ModelFile, head_size: int, interleaved: bool, theta: float, layer_type: str
) -> RopeSpec:
    """Of `rope_theta` and `rope_scaling`, or of `rope_parameters`: both in one, perhaps by type of layer."""
    keys = file.keys
    newer = "rope_parameters" in keys
    inner = keys.inner("rope_parameters" if newer else "rope_scaling")
    if newer and layer_type in inner:
        inner.refuse_rest({}, LAYER_TYPES)
        inner = inner.inner(layer_type)
    base = (inner if "rope_theta" in inner else keys).positive("rope_theta", theta)
    keys.get("rope_theta")
    share = (inner if "partial_rotary_factor" in inner else keys).positive("partial_rotary_factor", 1.0)
    rotary_dim = int(head_size * share)
    if rotary_dim > head_size or rotary_dim % 2 or not rotary_dim:
        raise keys.refusal("partial_rotary_factor", f"an even part of the head size {head_size}")
    factors: tuple[float, ...] = ()
    amplitude = 1.0
    kind = inner.get("rope_type", inner.get("type", "default"))
    match kind:
        case "default":
            pass
        case "linear":
            factors = (inner.positive("factor"),) * (rotary_dim // 2)
        case "llama3":
            factors = llama3_factors(inner, base, rotary_dim)
        case "longrope" | "su":
            factors, amplitude = _longrope(file, inner, rotary_dim)
        case _:
            raise inner.refusal("rope_type", "default, linear, llama3 or longrope")
    inner.refuse_rest({"original_max_position_embeddings": ()})
    return RopeSpec(rotary_dim, base, interleaved, factors, amplitude=amplitude)


def _longrope(file: ModelFile, inner: Keys, rotary_dim: int) -> tuple[tuple[float, ...], float]:
    """Phi-3's: one list of factors for requests within the first context, another for longer ones.

    Which of them is fixed at start, by the longest request there may be: keys in the cache are turned once.
    Returns the factors, and what turned elements are stretched by.
    """
    keys = file.keys
    said = inner if "original_max_position_embeddings" in inner else keys
    original, longest = said.count("original_max_position_embeddings"), keys.count("max_position_embeddings")
    is_long = file.passes(original)
    short, long = (_numbers(inner, key, rotary_dim // 2) for key in ("short_factor", "long_factor"))
    grown = inner.positive("factor", longest / original)
    amplitude = 1.0 if grown <= 1.0 else math.sqrt(1.0 + math.log(grown) / math.log(original))
    return long if is_long else short, inner.positive("attention_factor", amplitude)


def _numbers(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    given = keys.get(key)
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(isinstance(one, int | float) and 0.0 < one < math.inf for one in given)
    ):
        raise keys.refusal(key, f"a list of {count} positive numbers, half of what turns of a head")
    return tuple(map(float, given))


def _gguf_factors(keys: Keys, rotary_dim: int) -> tuple[float, ...]:
    """Of `rope.scaling.*`; what converters already put into a tensor is not said there."""
    if keys.one_of("rope.scaling.type", ("none", "linear"), "none") == "none":
        return ()
    return (keys.positive("rope.scaling.factor"),) * (rotary_dim // 2)


def llama3_factors(keys: Keys, theta: float, rotary_dim: int) -> tuple[float, ...]:
    """Llama 3.1's: slow frequencies are divided by `factor`, quick ones not, those between in proportion."""
    factor, original = keys.positive("factor"), keys.count("original_max_position_embeddings")
    low, high = keys.positive("low_freq_factor"), keys.positive("high_freq_factor")
    if high <= low:
        raise keys.refusal("high_freq_factor", f"more than low_freq_factor, {low}")
    factors = []
    for i in range(0, rotary_dim, 2):
        turns = original / (2 * math.pi * theta ** (i / rotary_dim))  # of this frequency in the first context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))  # of the undivided frequency
        factors.append(1.0 / (share + (1.0 - share) / factor))
    return tuple(factors)
