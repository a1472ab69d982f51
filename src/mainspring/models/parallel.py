"""A model shared out over ranks: which layers, heads, columns and rows of the vocabulary each of them has.

Theory of operation. `share_of` makes of a whole model the part of one rank, itself a model: a spec with fewer
layers and heads, and views (`views.py`) of the tensors it needs, so that a rank reads only its own bytes of
the file. What the ranks have to do together is in the decoder's walk, which is the same for all.

Stages follow one another by layers (pipeline parallelism). Within a stage, ranks share each layer (tensor
parallelism): queries, keys and values, gate and up by rows; the products after them by columns, so that one
sum per branch joins them; the head by rows of the vocabulary. Experts are shared out like MLPs, or whole ones
to each rank (expert parallelism): the sum is the same. Where there are more ranks than KV heads, each
is held by several. The table of embeddings is held whole: a row of it is looked up, never multiplied.

Ranks are numbered stage by stage: rank = stage * ranks per stage + the place within it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from mainspring.base.errors import ConfigError
from mainspring.base.messages import KVCacheConfig
from mainspring.models.families import Model
from mainspring.models.spec import AttnSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelSpec, weight_table
from mainspring.models.views import View


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False  # ranks of a stage have experts of their own, instead of a part of each
    # Data-parallel ranks in lock-step have experts of their own, for the rows of all.
    expert_rank: int = 0
    num_expert_ranks: int = 1

    @property
    def is_shared(self) -> bool:
        return self.world_size * self.num_expert_ranks > 1

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
    if place.expert_parallel or place.num_expert_ranks > 1:
        _check_experts(spec, place)
    if place.pipeline_parallel_size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {place.pipeline_parallel_size} must be at most {num_layers}, the "
            "layers of the model"
        )
    for layer in spec.layers if num_ranks > 1 else ():
        _check_layer(layer, place)


def _check_experts(spec: ModelSpec, place: Place) -> None:
    counts = [layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)]
    if not counts:
        raise ConfigError("enable_expert_parallel: this model has no experts; leave it out")
    if place.num_expert_ranks > min(counts):
        raise ConfigError(
            f"data_parallel_size {place.num_expert_ranks} must be at most {min(counts)}, the experts of "
            "the model"
        )


def _check_layer(layer: LayerSpec, place: Place) -> None:
    attn, num_ranks = layer.attn, place.tensor_parallel_size
    if not _shares(attn, _widths(layer.mlp, place.expert_parallel), num_ranks):
        widths = _widths(layer.mlp, place.expert_parallel)
        possible = [size for size in range(1, attn.num_heads + 1) if _shares(attn, widths, size)]
        raise ConfigError(
            f"tensor_parallel_size {num_ranks} does not divide this model: it has {attn.num_heads} query "
            f"heads, {attn.num_kv_heads} KV heads and {' and '.join(widths.values())}; use one of "
            f"{', '.join(map(str, possible))}"
        )
    if attn.qk_norm == "row":
        raise ConfigError(
            f"tensor_parallel_size {num_ranks}: norms over all heads of a row are not shared out yet; "
            "use pipeline_parallel_size"
        )


def _widths(mlp: MLPSpec | ExpertsSpec, expert_parallel: bool) -> dict[int, str]:
    """What of an MLP has to be divided, and what it is called."""
    if isinstance(mlp, MLPSpec):
        return {mlp.intermediate_size: f"an MLP of {mlp.intermediate_size}"}
    own = mlp.num_experts if expert_parallel else mlp.intermediate_size
    widths = {own: f"{own} experts" if expert_parallel else f"experts of {own}"}
    return widths if mlp.shared is None else widths | _widths(mlp.shared, expert_parallel)


def _shares(attn: AttnSpec, widths: Iterable[int], num_ranks: int) -> bool:
    shares_kv = attn.num_kv_heads % num_ranks == 0 or num_ranks % attn.num_kv_heads == 0
    return shares_kv and attn.num_heads % num_ranks == 0 and all(width % num_ranks == 0 for width in widths)


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
    whole_shapes = {part.role: part.shape for _, parts in weight_table(model.spec) for part in parts}
    names, views = {}, {}
    for _, parts in weight_table(spec):
        for role, shape in parts:
            whole_role = _whole_role(role, layers)
            if whole_role == "head" and model.spec.tied_embeddings:
                whole_role = "embedding"
            names[role] = f"{role} of rank {place.rank}"
            tensor = model.names[whole_role]
            if role.removesuffix(".bias") == "head":
                own = _vocabulary(model.spec, place)
                views[names[role]] = View(tensor, own.start, own.stop)
            else:
                views[names[role]] = _share_of_tensor(tensor, whole_shapes[whole_role], shape, place)
    return Model(spec, names, views, ignored=model.ignored.union(model.names.values()))


def _share_of_tensor(tensor: str, whole: tuple[int, ...], own: tuple[int, ...], place: Place) -> View:
    """The rank's part, by rows or by columns. Where there are fewer parts than ranks, neighbours have the
    same."""
    for axis, (length, own_length) in enumerate(zip(whole, own, strict=True)):
        if own_length < length:
            at = place.place * (length // own_length) // place.tensor_parallel_size
            begin, end = at * own_length, (at + 1) * own_length
            return View(tensor, begin, end) if axis == 0 else View(tensor, columns=(begin, end))
    return View(tensor)


def _whole_role(role: str, layers: range) -> str:
    if not role.startswith("layers."):
        return role
    _, index, kind = role.split(".", 2)
    return f"layers.{layers[int(index)]}.{kind}"


def _spec(spec: ModelSpec, place: Place, layers: range) -> ModelSpec:
    num_ranks = place.tensor_parallel_size
    shared = tuple(_layer(spec.layers[index], place) for index in layers)
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


def _layer(layer: LayerSpec, place: Place) -> LayerSpec:
    num_ranks = place.tensor_parallel_size
    attn = replace(
        layer.attn,
        num_heads=layer.attn.num_heads // num_ranks,
        num_kv_heads=max(1, layer.attn.num_kv_heads // num_ranks),
        scale=layer.attn.shape.scale,
    )
    return replace(layer, attn=attn, mlp=_narrowed(layer.mlp, place))


def _narrowed(mlp: MLPSpec | ExpertsSpec, place: Place) -> MLPSpec | ExpertsSpec:
    num_ranks = place.tensor_parallel_size
    if isinstance(mlp, MLPSpec):
        return replace(mlp, intermediate_size=mlp.intermediate_size // num_ranks)
    shared = mlp.shared
    if shared is not None:
        shared = replace(shared, intermediate_size=shared.intermediate_size // num_ranks)
    if place.num_expert_ranks > 1:
        begin, end = (
            mlp.num_experts * at // place.num_expert_ranks
            for at in (place.expert_rank, place.expert_rank + 1)
        )
        return replace(mlp, first=begin, num_here=end - begin)
    if place.expert_parallel:
        num_here = mlp.num_experts // num_ranks
        return replace(mlp, shared=shared, first=place.place * num_here, num_here=num_here)
    return replace(mlp, shared=shared, intermediate_size=mlp.intermediate_size // num_ranks)


def _vocabulary(spec: ModelSpec, place: Place) -> range:
    """The rows of the head that a rank has: in whole words of a grammar's mask, and of kernels' panels."""
    num_words, num_ranks = -(-spec.vocab_size // 32), place.tensor_parallel_size
    begin, end = (32 * (num_words * at // num_ranks) for at in (place.place, place.place + 1))
    return range(begin, min(end, spec.vocab_size))
