"""A model shared out over ranks: which layers, heads, columns and rows of the vocabulary each of them has.

Theory of operation. `share_of` makes of a whole model the part of one rank, itself a model: a spec with fewer
layers and heads, and views (`views.py`) of the tensors it needs, so that a rank reads only its own bytes of
the file. What the ranks have to do together is in the decoder's walk, which is the same for all.

Stages follow one another by layers (pipeline parallelism). Within a stage, ranks share each layer (tensor
parallelism): queries, keys and values, gate and up by rows; the products after them by columns, so that one
sum per branch joins them; the head by rows of the vocabulary. Where there are more ranks than KV heads, each
is held by several. The table of embeddings is held whole: a row of it is looked up, never multiplied.

Ranks are numbered stage by stage: rank = stage * ranks per stage + the place within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from mainspring.base.errors import ConfigError
from mainspring.base.messages import KVCacheConfig
from mainspring.models.families import Model
from mainspring.models.spec import AttnSpec, LayerSpec, ModelSpec, weight_table
from mainspring.models.views import View

BY_ROWS = frozenset({"wq", "wk", "wv", "w_gate", "w_up"})
BY_COLUMNS = frozenset({"wo", "w_down"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def place(self) -> int:
        """Within the stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def group(self) -> range:
        """The ranks that share its layers."""
        first = self.stage * self.tensor_parallel_size
        return range(first, first + self.tensor_parallel_size)

    def peer(self, stage: int) -> int:
        """The rank at its place in another stage; stages count round."""
        return stage % self.pipeline_parallel_size * self.tensor_parallel_size + self.place


ALONE = Place()


def check_divisible(spec: ModelSpec, place: Place) -> None:
    """Raises `ConfigError` with the numbers where ranks would not get equal shares."""
    num_ranks, num_layers = place.tensor_parallel_size, len(spec.layers)
    if place.pipeline_parallel_size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {place.pipeline_parallel_size} must be at most {num_layers}, the "
            "layers of the model"
        )
    for layer in spec.layers if num_ranks > 1 else ():
        attn, width = layer.attn, layer.mlp.intermediate_size
        shares_kv = attn.num_kv_heads % num_ranks == 0 or num_ranks % attn.num_kv_heads == 0
        if attn.num_heads % num_ranks or width % num_ranks or not shares_kv:
            raise ConfigError(
                f"tensor_parallel_size {num_ranks} does not divide this model: it has {attn.num_heads} query "
                f"heads, {attn.num_kv_heads} KV heads and an MLP of {width}; use one of "
                f"{', '.join(map(str, _divisors(attn, width)))}"
            )
        if attn.qk_norm == "row":
            raise ConfigError(
                f"tensor_parallel_size {num_ranks}: norms over all heads of a row are not shared out yet; "
                "use pipeline_parallel_size"
            )


def _divisors(attn: AttnSpec, width: int) -> Iterator[int]:
    for size in range(1, attn.num_heads + 1):
        shares_kv = attn.num_kv_heads % size == 0 or size % attn.num_kv_heads == 0
        if attn.num_heads % size == 0 and width % size == 0 and shares_kv:
            yield size


def layers_of(num_layers: int, place: Place) -> range:
    """As equal as can be; the later stages have the longer share, for the first has the embeddings' work."""
    stage, stages = place.stage, place.pipeline_parallel_size
    return range(num_layers * stage // stages, num_layers * (stage + 1) // stages)


def own_kv(config: KVCacheConfig, place: Place) -> KVCacheConfig:
    """The same pool for this stage's layers alone, by their number within the stage."""
    layers = layers_of(sum(len(group.layers) for group in config.groups), place)
    groups = [
        structs.replace(
            group, layers=tuple(layer - layers.start for layer in group.layers if layer in layers)
        )
        for group in config.groups
    ]
    return structs.replace(config, groups=tuple(groups))


def share_of(model: Model, place: Place) -> Model:
    """The part of one rank. Its views are of a source that the whole model was checked against.

    Raises `ConfigError` where the model cannot be shared out like that.
    """
    check_divisible(model.spec, place)
    layers = layers_of(len(model.spec.layers), place)
    spec = _spec(model.spec, place, layers)
    names, views = {}, {}
    for _, parts in weight_table(spec):
        for role, _ in parts:
            whole_role = _whole_role(role, layers)
            if role == "head" and model.spec.tied_embeddings:
                whole_role = "embedding"
            names[role] = f"{role} of rank {place.rank}"
            views[names[role]] = _view(model, role, model.names[whole_role], spec, place)
    return Model(spec, names, views, ignored=frozenset(model.names.values()))


def _whole_role(role: str, layers: range) -> str:
    if not role.startswith("layers."):
        return role
    _, index, kind = role.split(".", 2)
    return f"layers.{layers[int(index)]}.{kind}"


def _spec(spec: ModelSpec, place: Place, layers: range) -> ModelSpec:
    num_ranks = place.tensor_parallel_size
    shared = tuple(_layer(spec.layers[index], num_ranks) for index in layers)
    if place.is_first_stage:
        begin: dict[str, object] = {}
    else:
        begin = {
            "receives_from": place.peer(place.stage - 1),
            "num_positions": 0,
            "embedding_bias": False,
            "embedding_norm": False,
        }
    if place.is_last_stage:
        own = _vocabulary(spec, place)
        end: dict[str, object] = {"tied_embeddings": spec.tied_embeddings and place.world_size == 1}
        if num_ranks > 1 and spec.has_head:
            end |= {"head_begin": own.start, "head_size": len(own)}
    else:
        end = {
            "sends_to": place.peer(place.stage + 1),
            "output_norm": False,
            "has_head": False,
            "head_bias": False,
        }
    return replace(spec, layers=shared, **begin, **end)  # type: ignore[arg-type]


def _layer(layer: LayerSpec, num_ranks: int) -> LayerSpec:
    attn = replace(
        layer.attn,
        num_heads=layer.attn.num_heads // num_ranks,
        num_kv_heads=max(1, layer.attn.num_kv_heads // num_ranks),
        scale=layer.attn.shape.scale,
    )
    return replace(
        layer,
        attn=attn,
        mlp=replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // num_ranks),
    )


def _vocabulary(spec: ModelSpec, place: Place) -> range:
    """The rows of the head that a rank has: in whole words of a grammar's mask, and of kernels' panels."""
    num_words, num_ranks = -(-spec.vocab_size // 32), place.tensor_parallel_size
    begin, end = (32 * (num_words * at // num_ranks) for at in (place.place, place.place + 1))
    return range(begin, min(end, spec.vocab_size))


def _view(model: Model, role: str, tensor: str, spec: ModelSpec, place: Place) -> View:
    kind = role.split(".")[2] if role.startswith("layers.") else role.removesuffix(".bias")
    at, num_ranks = place.place, place.tensor_parallel_size
    if num_ranks == 1:
        return View(tensor)
    if kind == "head":
        own = _vocabulary(model.spec, place)
        return View(tensor, own.start, own.stop)
    if not role.startswith("layers."):
        return View(tensor)
    layer = spec.layers[int(role.split(".")[1])]
    if kind in ("wk", "wv"):
        whole = model.spec.layers[0].attn.num_kv_heads
        at = at * whole // num_ranks if whole < num_ranks else at
        return _rows(tensor, at, layer.attn.k_width)
    if kind in BY_ROWS:
        return _rows(tensor, at, layer.attn.q_width if kind == "wq" else layer.mlp.intermediate_size)
    if kind in BY_COLUMNS and not role.endswith(".bias"):
        width = layer.attn.q_width if kind == "wo" else layer.mlp.intermediate_size
        return View(tensor, columns=(at * width, (at + 1) * width))
    return View(tensor)


def _rows(tensor: str, at: int, num_rows: int) -> View:
    return View(tensor, at * num_rows, (at + 1) * num_rows)
