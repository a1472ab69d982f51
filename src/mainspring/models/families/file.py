"""A model's file as adapters see it: keys by one name and tensors by role, whatever its form; and the pieces
of a spec that most families read alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mainspring.base.errors import CheckpointError
from mainspring.models.families.keys import Keys
from mainspring.models.families.model import Model, names_of
from mainspring.models.families.names import CONFIG_NAMES, GGUF_NAMES, LAYER_TYPES
from mainspring.models.families.rope import SCALINGS, config_rope, gguf_rope
from mainspring.models.spec import AttnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from mainspring.models.views import TensorSource, View

MAX_LAYERS = 10_000  # that a config alone may ask for: no file bounds it


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

    def heads(self, *, kv_heads: int | None = None, size: int | None = None) -> tuple[int, int, int]:
        """Query heads, KV heads, and the size of one.

        kv_heads, size: what configs of this family mean that do not say; None: as many as query heads, and
        their share of the hidden size.
        """
        keys = self.keys
        if self.is_gguf:
            kv_heads = size = None
        num_heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
        if "head_dim" not in keys and size is None and hidden % num_heads:
            raise keys.refusal("num_attention_heads", f"a divisor of {keys.shown('hidden_size')}, {hidden}")
        head_size = keys.count("head_dim", hidden // num_heads if size is None else size)
        if head_size % 2:
            raise keys.refusal("head_dim", "an even number: elements of a head turn in pairs")
        if self.is_gguf and keys.count("value_head_dim", head_size) != head_size:
            raise keys.refusal("value_head_dim", f"key_length, {head_size}")
        num_kv_heads = keys.count("num_key_value_heads", num_heads if kv_heads is None else kv_heads)
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
        layer_type: str | None = None,
        partial: bool = False,
        scalings: tuple[str, ...] = SCALINGS,
    ) -> RopeSpec:
        """With the scaling that a config names. interleaved: the order of rows of Q and K. theta: where the
        file does not say. layer_type: of which layers, in families whose configs have several. partial: a
        config may say that only a part of each head turns. scalings: those that it may name."""
        if self.is_gguf:
            return gguf_rope(self, head_size, interleaved, theta)
        return config_rope(self, head_size, interleaved, theta, layer_type, partial, scalings)

    def windows(self, default: Sequence[bool] | None = None, size: int | None = None) -> list[int | None]:
        """Each layer's window. Without a list of layers' kinds in the config `default` says which have one;
        None: all, where there is a `sliding_window`. size: see `window`."""
        window = self.window(size)
        return [window if has else None for has in self.windowed(default, size)]

    def window(self, default: int | None = None) -> int | None:
        """default: what configs of this family mean that do not say; null is none."""
        if self.is_gguf and self.keys.get("sliding_window") == 0:
            return None
        if not self.is_gguf and not self.keys.says("sliding_window"):
            return default
        return self.keys.count("sliding_window") if "sliding_window" in self.keys else None

    def windowed(self, default: Sequence[bool] | None = None, size: int | None = None) -> list[bool]:
        """Which layers have a window; see `windows`."""
        keys, num_layers, window = self.keys, self.num_layers(), self.window(size)
        if self.is_gguf and isinstance(pattern := keys.get("sliding_window_pattern"), list):
            if len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
                raise keys.refusal("sliding_window_pattern", "true or false for each layer")
            return [one and window is not None for one in pattern]
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

    def with_switched_windows(self, attn: AttnSpec, default: Sequence[bool]) -> list[AttnSpec]:
        """As `with_windows`, for configs that have windows only with `use_sliding_window`."""
        keys = self.keys
        if self.is_gguf:
            return self.with_windows(attn)
        if keys.flag("use_sliding_window", False):
            keys.count("sliding_window")
            return self.with_windows(attn, default)
        keys.get("sliding_window")
        full = [LAYER_TYPES[0]] * self.num_layers()
        if keys.get("layer_types", full) != full:
            raise keys.refusal("layer_types", f"{LAYER_TYPES[0]} everywhere, without use_sliding_window")
        return [attn] * len(full)

    def has_bias(self, role: str, key: str) -> bool:
        """Whether products of `role` have one: a config says so by `key`, a GGUF file has the tensor."""
        if self.is_gguf:
            return f"{self.names[role].replace('{}', '0')}.bias" in self.tensors
        return self.keys.flag(key, False)

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
        """Whether the head is the embedding. default: what configs of this family mean that do not say.

        A file that has a head of its own, other than the embedding, is believed rather than its config.
        """
        own = self.names["head"] + ".weight"
        if self.is_gguf:
            return own not in self.tensors
        tied = self.keys.flag("tie_word_embeddings", default)
        if not tied or self.source is None or own not in self.tensors:
            return tied
        embedding = self.names["embedding"] + ".weight"
        return np.array_equal(self.source.raw(own), self.source.raw(embedding))

    def norm(self, key: str = "rms_norm_eps", default: float | None = None) -> NormSpec:
        """default: the eps of configs that do not say; GGUF files must."""
        eps = self.keys.positive(key, None if self.is_gguf else default)
        return NormSpec(eps, is_layer_norm=key != "rms_norm_eps")

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


def plain_attention(
    file: ModelFile,
    *,
    kv_heads: int | None = None,
    size: int | None = None,
    interleaved: bool = False,
    theta: float = 10_000.0,
    layer_type: str | None = None,
    **more: Any,
) -> AttnSpec:
    """Heads that turn; see `ModelFile.heads` and `rope`. more: further fields of `AttnSpec`."""
    num_heads, num_kv_heads, head_size = file.heads(kv_heads=kv_heads, size=size)
    rope = file.rope(head_size, interleaved=interleaved, theta=theta, layer_type=layer_type)
    return AttnSpec(num_heads, num_kv_heads, head_size, rope, **more)
