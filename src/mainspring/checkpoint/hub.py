"""Models by their names on the Hugging Face hub: `org/name`, `org/name:file.gguf`, `org/name:Q4_K_M`.

The hub is asked once and briefly what it has; of that, only the files which a model needs are fetched, by
huggingface_hub into its own cache, so that other programs share them. A hub that does not answer is no
reason to fail: then what the cache has is taken, and said so. A hub that answers no is: a wrong name,
revision or token is not served from memory.

Environment: `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_CACHE` mean what they mean to
other programs. huggingface_hub is imported only when a hub is to be asked.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mainspring.base.errors import CheckpointError
from mainspring.base.log import get_logger
from mainspring.checkpoint.folder import CONFIG_FILE, PICKLES, SETTINGS_FILES, WEIGHTS_FILE
from mainspring.checkpoint.gguf import PART_NAME
from mainspring.checkpoint.quoting import MAX_QUOTED, quoted
from mainspring.checkpoint.safetensors import INDEX_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = get_logger(__name__)

PROBE_S = 2.0  # for a hub to answer at all
MAIN: Final = "main"
_PART = r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}"
_NAME: Final = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<choice>[^:]+))?", re.ASCII)
_QUANT: Final = re.compile(r"(?:.*[-_.])?((?:I?Q\d|TQ\d|MXFP\d|BF16|F16|F32|FP16|FP32)\w*)", re.IGNORECASE)
USUAL_QUANT: Final = "Q4_K_M"  # taken where a repository has several and none is asked for
NO_SHARDS: Final = ("consolidated", "adapter")  # how weights begin that no index has
TOKEN_HOW: Final = "--hf-token or HF_TOKEN"


class Choice(NamedTuple):
    """What of a repository is needed."""

    files: list[str]
    model: str  # what is to be opened: a file, or "" for the folder


class _Unreachable(Exception):
    """No hub answered; the message is half a sentence that says so."""


def hub_endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Whether the user wants no hub to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def is_hub_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def hub_cache_dir() -> Path:
    """Where huggingface_hub keeps what it fetched, for all programs."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(variable):
            return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def find_on_hub(
    name: str,
    fetch: bool,
    cache_dir: Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    progress: bool = True,
) -> Path:
    """The file or folder of a name of the hub. `fetch`: ask the hub, and bring what is missing; else what
    the cache has. cache_dir: default: huggingface_hub's.

    Raises `CheckpointError`, one line that says what to do.
    """
    place = _Place(name, revision or MAIN, cache_dir or hub_cache_dir())
    if not fetch:
        return place.cached(f"the hub was not asked: get it with `mainspring pull {name}`")
    if is_offline():
        return place.cached("HF_HUB_OFFLINE is set: unset it to ask the hub")
    try:
        return _Hub(place, token).bring(progress)
    except _Unreachable as error:
        path = place.cached(f"{error}: try again when the network is there")
        logger.warning("%s; %s is taken from the cache: %s", error, name, path)
        return path


class _Place:
    """A name, and where it is in the cache."""

    def __init__(self, name: str, revision: str, cache_dir: Path) -> None:
        match = _NAME.fullmatch(name)
        assert match is not None
        self.name = name
        self.repository: str = match["repository"]
        self.choice: str | None = match["choice"]
        self.revision = revision
        self.cache_dir = cache_dir

    def snapshot(self) -> Path | None:
        """The files of the revision, as huggingface_hub lays them out."""
        try:
            commit = (self._folder / "refs" / self.revision).read_text().strip()
        except (OSError, ValueError):  # a null byte; no text
            commit = self.revision
        path = self.snapshot_of(commit)
        return path if re.fullmatch(r"\w[\w.-]*", commit) and path.is_dir() else None

    def snapshot_of(self, commit: str) -> Path:
        return self._folder / "snapshots" / commit

    @property
    def _folder(self) -> Path:
        return self.cache_dir / f"models--{self.repository.replace('/', '--')}"

    def cached(self, way_out: str) -> Path:
        """The model as the cache has it. Raises `CheckpointError` that ends in `way_out` if it has not."""
        shown = self.repository if self.revision == MAIN else f"{self.repository}, revision {self.revision},"
        snapshot = self.snapshot()
        if snapshot is None:
            raise CheckpointError(f"{shown} is not in the cache ({self.cache_dir}), and {way_out}")
        files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        try:
            return snapshot / choose(self.repository, sorted(files), self.choice).model
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; that is what the cache has ({snapshot}), and {way_out}"
            ) from None


# ---- which files -------------------------------------------------------------------------------------------


def choose(repository: str, files: Sequence[str], choice: str | None) -> Choice:
    """What is needed of a repository's `files`. choice: a GGUF file, the name of a quantisation, or None.

    Raises `CheckpointError` that says what there is instead.
    """
    models = _gguf_models(files)
    if choice is None:
        weights = _weights(files)
        if CONFIG_FILE in files and weights:
            settings = [file for file in files if any(fnmatch(file, glob) for glob in SETTINGS_FILES)]
            return Choice(settings + weights, "")
        if not models:
            raise CheckpointError(f"{repository} has {_what_instead(files)}")
        choice = next(iter(models)) if len(models) == 1 else USUAL_QUANT
    elif choice.endswith(".gguf"):
        for first, parts in models.items():
            if choice in parts:
                return Choice(parts, first)
        raise CheckpointError(f"{repository} has no file {quoted(choice)}{_nearest(choice, list(models))}")
    found = [first for first in models if choice in (first, _quant(first))]
    found = found or [first for first in models if choice.casefold() == _quant(first).casefold()]
    if len(found) == 1:
        return Choice(models[found[0]], found[0])
    if found:
        raise CheckpointError(f"{repository} has several files of {choice}; give one: {', '.join(found)}")
    quants = sorted({_quant(first) for first in models} - {""})
    there = f"its GGUF files are {', '.join(quants)}" if quants else "it has no GGUF files"
    raise CheckpointError(f"{repository} has no {choice}; {there}: give one as {repository}:NAME")


def _gguf_models(files: Sequence[str]) -> dict[str, list[str]]:
    """First file -> all its parts. Projectors of images are no models."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if not file.endswith(".gguf") or Path(file).name.startswith("mmproj"):
            continue
        part = PART_NAME.fullmatch(file)
        first = file if part is None else f"{part['stem']}-00001-of-{part['count']}.gguf"
        models.setdefault(first, []).append(file)
    return models


def _quant(file: str) -> str:
    """What a file's name says of its quantisation; empty if nothing."""
    part = PART_NAME.fullmatch(file)
    stem = Path(part["stem"]).name if part is not None else Path(file).stem
    match = _QUANT.fullmatch(stem)
    return match[1] if match is not None else ""


def _weights(files: Sequence[str]) -> list[str]:
    if WEIGHTS_FILE in files:
        return [WEIGHTS_FILE]
    if INDEX_FILE in files:
        shards = (file for file in files if file.endswith(".safetensors") and "/" not in file)
        return [INDEX_FILE, *(file for file in shards if not file.startswith(NO_SHARDS))]
    return []


def _what_instead(files: Sequence[str]) -> str:
    expected = f"expected {CONFIG_FILE} with {WEIGHTS_FILE} or {INDEX_FILE}, or a GGUF file"
    if any(file in files for file in PICKLES):
        return (
            f"its weights only as a pickle ({PICKLES[0]}), which could run code and is not read; {expected}"
        )
    if "adapter_config.json" in files:
        return f"an adapter (LoRA), which is not supported; {expected}"
    return f"no model that can be read; {expected}"


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, 0.3)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; it has {', '.join(names[:5])}" if names else "; it has no GGUF files"


# ---- the hub -----------------------------------------------------------------------------------------------


class _Hub:
    def __init__(self, place: _Place, token: str | None) -> None:
        from huggingface_hub import HfApi

        self._place = place
        self._token = token
        self._endpoint = hub_endpoint()
        self._api: HfApi = HfApi(endpoint=self._endpoint, token=token, library_name="mainspring")

    def bring(self, progress: bool) -> Path:
        """Everything that is needed into the cache; the model's path there."""
        place = self._place
        info = self._judged(
            lambda: self._api.model_info(place.repository, revision=place.revision, timeout=PROBE_S), PROBE_S
        )
        choice = choose(place.repository, [file.rfilename for file in info.siblings or ()], place.choice)
        snapshot = place.snapshot_of(info.sha)
        if place.snapshot() != snapshot or not all((snapshot / file).is_file() for file in choice.files):
            self._fetch(choice.files, info.sha, progress)
        return snapshot / choice.model

    def _fetch(self, files: list[str], commit: str, progress: bool) -> None:
        """The last file is asked for by the revision's own name, which the cache then knows to be this
        commit: so a name leads to a whole model, or to the one before."""
        from huggingface_hub import utils

        were_off = utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
        if not progress:
            utils.disable_progress_bars()  # type: ignore[attr-defined]
        try:
            for file in files[:-1]:
                self._judged(partial(self._download, file, commit))
            self._judged(partial(self._download, files[-1], self._place.revision))
        except _Unreachable as error:
            raise CheckpointError(
                f"the download of {self._place.repository} broke off ({error}); "
                "pull again to go on from there"
            ) from None
        finally:
            if not were_off:
                utils.enable_progress_bars()  # type: ignore[attr-defined]

    def _download(self, file: str, revision: str) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self._place.repository,
            file,
            revision=revision,
            cache_dir=self._place.cache_dir,
            token=self._token,
            endpoint=self._endpoint,
            library_name="mainspring",
        )

    def _judged(self, ask: Callable[[], Any], limit_s: float | None = None) -> Any:
        """What `ask` answers within the limit. Raises `CheckpointError` for a no, `_Unreachable` for none."""
        answers: list[Any] = []

        def run() -> None:
            try:
                answers.append(ask())
            except Exception as error:
                answers.append(error)

        if limit_s is None:
            run()
        else:  # a thread, because looking up a host's name knows no time limit
            asking = threading.Thread(target=run, daemon=True)
            asking.start()
            asking.join(limit_s)
        if not answers:
            raise _Unreachable(f"the hub does not answer (nothing within {PROBE_S:g} s)")
        if isinstance(answers[0], Exception):
            raise self._told(answers[0]) from None
        return answers[0]

    def _told(self, error: Exception) -> Exception:
        """What went wrong, in our words."""
        from huggingface_hub import errors

        repository, endpoint = self._place.repository, self._endpoint
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            return CheckpointError(
                f"{repository} is gated: accept its terms at {endpoint}/{repository}, and give a token of "
                f"that account ({TOKEN_HOW})"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointError(
                f"{repository} has no revision {quoted(self._place.revision)}; give a branch, a tag or a "
                f"commit, or leave it out for {MAIN}"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return CheckpointError(
                f"no repository {repository} on the hub ({endpoint}), or it is private, and no such path "
                f"here; check the name, or give a token that may read it ({TOKEN_HOW})"
            )
        if status in (401, 403):
            return CheckpointError(
                f"the hub refuses {repository} ({status}): the token is wrong or may not read it; give "
                f"another ({TOKEN_HOW})"
            )
        if isinstance(error, OSError) and (error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return CheckpointError(
                f"{self._place.cache_dir}: {repository} cannot be written there ({error.strerror}); make "
                "room or set HF_HOME or download_dir to another folder"
            )
        if status is not None:
            return _Unreachable(f"the hub answers {status}")
        said = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
        return _Unreachable(f"the hub does not answer ({(said or type(error).__name__)[:MAX_QUOTED]})")
