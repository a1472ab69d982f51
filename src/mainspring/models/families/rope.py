"""Rotary positions: what configs and GGUF files say of them, in their several dialects.

A scaling is a list of factors that frequencies are divided by, and an amplitude. What depends on how long a
request is is decided at start, by the longest that there may be: keys in the cache are turned once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from mainspring.models.families.keys import Keys
from mainspring.models.families.names import LAYER_TYPES
from mainspring.models.spec import RopeSpec

if TYPE_CHECKING:
    from mainspring.models.families.file import ModelFile


SCALINGS: Final = ("default", "linear", "llama3", "yarn")  # of most families
LONGROPE: Final = ("default", "longrope", "su")  # of Phi's


class Scaling(NamedTuple):
    factors: tuple[float, ...] = ()  # of each frequency; empty: 1
    amplitude: float = 1.0


def config_rope(
    file: ModelFile,
    head_size: int,
    interleaved: bool,
    theta: float,
    layer_type: str | None,
    partial: bool,
    scalings: tuple[str, ...],
) -> RopeSpec:
    """Of `rope_theta` and `rope_scaling`, or of `rope_parameters`: both in one, by type of layer if
    `layer_type` says of which."""
    keys = file.keys
    newer = "rope_parameters" in keys
    inner = keys.inner("rope_parameters" if newer else "rope_scaling")
    if newer and layer_type is not None:
        inner.refuse_rest({}, LAYER_TYPES)
        inner = inner.inner(layer_type)
    base = (inner if "rope_theta" in inner else keys).positive("rope_theta", theta)
    said = inner if "partial_rotary_factor" in inner else keys
    share = said.positive("partial_rotary_factor", 1.0)
    for key in ("rope_theta", "partial_rotary_factor"):
        keys.get(key)  # where both say it, the inner one is meant
    rotary_dim = int(head_size * share)
    if rotary_dim > head_size or rotary_dim % 2 or not rotary_dim:
        raise said.refusal("partial_rotary_factor", f"an even part of the head size {head_size}")
    if rotary_dim != head_size and not partial:
        raise said.refusal("partial_rotary_factor", "1: models of this family turn whole heads")
    kind = "rope_type" if "rope_type" in inner else "type"
    if inner.get(kind, "default") not in scalings:
        raise inner.refusal(kind, f"one of {', '.join(scalings)}")
    factors, amplitude = _scaling(file, inner, base, rotary_dim)
    inner.refuse_rest({})
    return RopeSpec(rotary_dim, base, interleaved, factors, amplitude=amplitude)


def _scaling(file: ModelFile, inner: Keys, base: float, rotary_dim: int) -> Scaling:
    said = inner.get("type", "default")
    match inner.get("rope_type", said):
        case "linear":
            return Scaling((inner.positive("factor"),) * (rotary_dim // 2))
        case "llama3":
            return Scaling(llama3_factors(inner, base, rotary_dim))
        case "yarn":
            return _config_yarn(file, inner, base, rotary_dim)
        case "longrope" | "su":
            return _longrope(file, inner, rotary_dim)
        case _:
            return Scaling()


def _config_yarn(file: ModelFile, inner: Keys, base: float, rotary_dim: int) -> Scaling:
    factor = inner.positive("factor")
    original = inner.count("original_max_position_embeddings", file.keys.count("max_position_embeddings"))
    fast, slow = inner.positive("beta_fast", 32.0), inner.positive("beta_slow", 1.0)
    truncate = inner.flag("truncate", True)
    if base <= 1.0:
        raise file.keys.refusal("rope_theta", "more than 1, for yarn")
    factors = yarn_factors(factor, original, base, rotary_dim, fast, slow, truncate)
    amplitude = yarn_amplitude(factor)
    own, of_scores = (inner.positive(key, 1.0) for key in ("mscale", "mscale_all_dim"))
    if "mscale" in inner and "mscale_all_dim" in inner:
        amplitude = yarn_amplitude(factor, own) / yarn_amplitude(factor, of_scores)
    return Scaling(factors, inner.positive("attention_factor", amplitude))


def _longrope(file: ModelFile, inner: Keys, rotary_dim: int) -> Scaling:
    """Phi-3's: a list of factors for requests within the first context, another for longer ones."""
    keys = file.keys
    said = inner if "original_max_position_embeddings" in inner else keys
    original, longest = said.count("original_max_position_embeddings"), keys.count("max_position_embeddings")
    if original == 1:
        raise said.refusal("original_max_position_embeddings", "more than 1")
    is_long = file.passes(original)
    short, long = (_numbers(inner, key, rotary_dim // 2) for key in ("short_factor", "long_factor"))
    grown = inner.positive("factor", longest / original)
    amplitude = 1.0 if grown <= 1.0 else math.sqrt(1.0 + math.log(grown) / math.log(original))
    return Scaling(long if is_long else short, inner.positive("attention_factor", amplitude))


def _numbers(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    given = keys.get(key)
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(isinstance(one, int | float) and 0.0 < one < math.inf for one in given)
    ):
        raise keys.refusal(key, f"a list of {count} positive numbers, half of what turns of a head")
    return tuple(map(float, given))


def gguf_rope(file: ModelFile, head_size: int, interleaved: bool, theta: float) -> RopeSpec:
    """Of `rope.*`, of layers that see everything: of others adapters know. Factors of Llama 3 and of Phi-3
    are tensors instead."""
    keys = file.keys
    rotary_dim = keys.count("rotary_dim", head_size)
    if rotary_dim > head_size or rotary_dim % 2:
        raise keys.refusal("rotary_dim", f"an even number up to the head size {head_size}")
    base = keys.positive("rope_theta", theta)
    factors, amplitude = _gguf_scaling(keys, base, rotary_dim)
    has_factors = "rope_freqs.weight" in file.tensors
    return RopeSpec(rotary_dim, base, interleaved, factors, has_factors, amplitude)


def _gguf_scaling(keys: Keys, base: float, rotary_dim: int) -> Scaling:
    match keys.one_of("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "none"):
        case "linear":
            return Scaling((keys.positive("rope.scaling.factor"),) * (rotary_dim // 2))
        case "yarn":
            factor = keys.positive("rope.scaling.factor")
            if base <= 1.0:
                raise keys.refusal("rope_theta", "more than 1, for yarn")
            original = keys.count("original_max_position_embeddings", keys.count("max_position_embeddings"))
            keys.one_of("rope.scaling.yarn_ext_factor", (1.0,), 1.0)
            fast = keys.positive("rope.scaling.yarn_beta_fast", 32.0)
            slow = keys.positive("rope.scaling.yarn_beta_slow", 1.0)
            amplitude = keys.positive("rope.scaling.attn_factor", yarn_amplitude(factor))  # the older key
            return Scaling(
                yarn_factors(factor, original, base, rotary_dim, fast, slow, True),
                keys.positive("rope.scaling.yarn_attn_factor", amplitude),
            )
        case _:
            return Scaling()


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


def yarn_factors(
    factor: float, original: int, theta: float, rotary_dim: int, fast: float, slow: float, truncate: bool
) -> tuple[float, ...]:
    """YaRN's: as Llama 3's, but the proportion is one of places in the row of frequencies.

    The first divided one turns `fast` times in the first context, the first that is wholly divided `slow`
    times; truncate: both are whole places.
    """

    def place(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(fast), place(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    factors = []
    for i in range(rotary_dim // 2):
        divided = min(1.0, max(0.0, (i - low) / (high - low if high != low else 0.001)))
        factors.append(1.0 / (1.0 - divided + divided / factor))
    return tuple(factors)


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
