"""What an adapter gives: a spec, and where in the file each of its roles is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mainspring.models.spec import ModelSpec, weight_table
from mainspring.models.views import View


@dataclass(frozen=True)
class Model:
    """A network and its place in a file.

    `names` has a tensor for every role of the spec. Where that is no tensor of the file but a piece or
    another form of one, `views` says how it is made. `ignored` are tensors that need not be read: what they
    say is said elsewhere.
    """

    spec: ModelSpec
    names: dict[str, str]
    views: dict[str, View] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


def names_of(spec: ModelSpec, table: Mapping[str, str]) -> dict[str, str]:
    """Every role's tensor. table: a role, or one within a layer, -> the name without `.weight` and `.bias`.

    `{}` in a name is the layer's index, `{expert}` an expert's, whose roles are in the table without it. A
    bias whose own role is in the table has exactly that name.
    """
    return {role: _name(role, table) for _, parts in weight_table(spec) for role, _ in parts}


def _name(role: str, table: Mapping[str, str]) -> str:
    index = expert = ""
    if role.startswith("layers."):
        _, index, role = role.split(".", 2)
    if role.startswith("experts."):
        _, expert, matrix = role.split(".")
        role = f"experts.{matrix}"
    if role in table and role.endswith(".bias"):
        return table[role].replace("{}", index)
    stem = role.removesuffix(".bias")
    name = table[stem].replace("{}", index).replace("{expert}", expert)
    return name + (".bias" if role.endswith(".bias") else ".weight")
