"""The Hugging Face Hub: downloads those files of a model that are read, into the Hub's cache, and uploads exports."""

import dataclasses
import functools
import glob
import pathlib
import re
from collections.abc import Iterable

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.pretrained import tokenizer_files
from ladder_jax.pretrained.huggingface import read
from ladder_jax.pretrained.source import REFIT

PREFIX = "hf://"
TIMEOUT = 10.0  # seconds until the Hub has to answer
_PART = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"({_PART}/{_PART})(?:/([^@]+\.gguf))?(?:@(.+))?", re.ASCII)
_PICKLES = (".bin", ".pt", ".pth")


@dataclasses.dataclass(frozen=True)
class Identifier:
    """`org/name[@revision]`; with `file`, `org/name/FILE.gguf[@revision]`. `hf://` may stand before it."""

    repository: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> "Identifier | None":
        """None for what is no identifier, such as `model.gguf` or `a/b/c`."""
        match = _ID.fullmatch(name.removeprefix(PREFIX))
        if match is None or (match[2] is None and match[1].endswith((".gguf", ".safetensors"))):
            return None
        return cls(*match.groups())

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{self.repository}{file}" + (f"@{self.revision}" if self.revision else "")


@dataclasses.dataclass(frozen=True)
class _Repository:
    """One commit of a repository. names: of its files; without a connection, of those in the cache.

    cached: their folder, if there is no connection; reason: of that.
    """

    identifier: Identifier
    commit: str
    names: frozenset[str]
    cached: pathlib.Path | None = None
    reason: str = ""

    def fetch(self, files: Iterable[str]) -> pathlib.Path:
        """The folder with `files`. Raises UserError for a file that cannot be downloaded."""
        if self.cached is None:
            # By the revision's name, which the cache then knows without a connection, too.
            folder = _snapshot(self.identifier, [glob.escape(file) for file in files])
            if folder.name != self.commit:
                raise RunFailed(f"'{self.identifier}' has just changed on the Hub: repeat the command")
            return folder
        for file in files:
            if file not in self.names:
                raise UserError(f"{_no_connection(self.reason)}, and {_cache()} holds {self.identifier} without {file}")
        return self.cached


def download(identifier: Identifier, *, weights: bool = True) -> tuple[pathlib.Path, Identifier]:
    """The Hugging Face folder or GGUF file of that name in the Hub's cache, and the identifier with its commit.

    Downloads what is read of it and is not there yet: not the formats of other programs. weights: False for the
    configuration alone (of a GGUF file, which holds both, everything). The token is the Hub's own: HF_TOKEN, or
    `hf auth login`'s. Without a connection, the cache is used; a UserError says so if it lacks a file.
    """
    path, commit = _download(identifier, weights=weights)
    return path, dataclasses.replace(identifier, revision=commit)


def push(folder: pathlib.Path, repository: str, *, private: bool | None = None, message: str | None = None) -> str:
    """Upload an exported folder to the Hub, into a repository that is created if there is none. Returns the URL.

    private: of a new repository; None: the account's default. Raises UserError for a folder that is no export and a
    name that is none, RunFailed if the Hub refuses it or does not answer.
    """
    hub, identifier = _library(), Identifier.parse(repository)
    if identifier is None or identifier.file or identifier.revision:
        raise UserError(f"{repository!r} is no repository's name: write org/name")
    if not (folder / read.CONFIG).is_file():
        raise UserError(f"{str(folder)!r} is no export: it holds no {read.CONFIG}")
    try:
        api = hub.HfApi()
        api.create_repo(identifier.repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=identifier.repository, folder_path=folder, commit_message=message or "Upload by ladder_jax"
        )
    except Exception as error:  # of the client's HTTP library, which differs between its versions
        raise RunFailed(f"{repository!r} could not be uploaded: {_line(error)}") from error
    return str(done.commit_url).partition("/commit/")[0]


@functools.cache
def _download(identifier: Identifier, *, weights: bool) -> tuple[pathlib.Path, str]:
    """Asks the Hub once a process: a branch that moves meanwhile must not mix two models."""
    repository = _repository(identifier)
    if identifier.file or read.CONFIG not in repository.names:
        file = identifier.file or _only_gguf(repository)
        if file not in repository.names and repository.cached is None:
            raise UserError(f"'{identifier}': there is no such file in {identifier.repository}{_others(repository)}")
        return repository.fetch([file]) / file, repository.commit
    if not weights:
        return repository.fetch([read.CONFIG]), repository.commit
    wanted = (read.CONFIG, read.GENERATION, REFIT, *tokenizer_files.FILES)
    repository.fetch([name for name in wanted if name in repository.names])
    return repository.fetch(_weights(repository)), repository.commit


def _weights(repository: _Repository) -> list[str]:
    """The safetensors files: those that the index lists, or the only one."""
    names = repository.names
    if read.INDEX in names:
        listed = read.read_object(repository.fetch([read.INDEX]) / read.INDEX).get("weight_map")
        shards = sorted({name for name in listed.values() if isinstance(name, str)} if isinstance(listed, dict) else ())
        for name in shards:
            if repository.cached is None and name not in names:
                raise UserError(f"'{repository.identifier}' lists {name} in its {read.INDEX}, and does not hold it")
        return [read.INDEX, *shards]
    if read.WEIGHTS not in names and repository.cached is None:
        if _ggufs(repository):
            raise UserError(f"'{repository.identifier}' holds no safetensors: {_choice(repository)}")
        pickles = any(name.endswith(_PICKLES) for name in names)
        why = "only weights as pickles, which can run any program when they are opened" if pickles else "no safetensors"
        raise UserError(f"'{repository.identifier}' holds {why}")
    return [read.WEIGHTS]


def _only_gguf(repository: _Repository) -> str:
    files = _ggufs(repository)
    if not files:
        raise UserError(f"'{repository.identifier}' holds no {read.CONFIG} and no GGUF file: no model that we can read")
    if len(files) > 1:
        raise UserError(f"'{repository.identifier}' holds several models: {_choice(repository)}")
    return files[0]


def _choice(repository: _Repository) -> str:
    files = _ggufs(repository)
    more = f" and {len(files) - 8} more" if files[8:] else ""
    example = dataclasses.replace(repository.identifier, file=files[0])
    return f"name one of its GGUF files, as in '{example}' ({', '.join(files[:8])}{more})"


def _others(repository: _Repository) -> str:
    files = _ggufs(repository)
    return f" (allowed: {', '.join(files[:8])})" if files else ""


def _ggufs(repository: _Repository) -> list[str]:
    return sorted(name for name in repository.names if name.endswith(".gguf"))


def _repository(identifier: Identifier) -> _Repository:
    """What the Hub lists, or without a connection the cache. Raises UserError where there is nothing."""
    hub = _library()
    try:
        info = hub.HfApi().model_info(identifier.repository, revision=identifier.revision, timeout=TIMEOUT)
    except hub.errors.RevisionNotFoundError:
        raise UserError(f"'{identifier}': the Hub has no revision {identifier.revision!r} of it") from None
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
        raise UserError(
            f"there is no model {str(identifier)!r}: no such path here, and no such repository at"
            f" {hub.constants.ENDPOINT} for you (for private ones: `hf auth login`, or HF_TOKEN)"
        ) from None
    except Exception as error:  # of the client's HTTP library, which differs between its versions
        return _from_cache(identifier, _line(error))
    return _Repository(identifier, info.sha, frozenset(file.rfilename for file in info.siblings or ()))


def _from_cache(identifier: Identifier, reason: str) -> _Repository:
    try:
        settings = dict(revision=identifier.revision, local_files_only=True, allow_patterns=[read.CONFIG])
        folder = pathlib.Path(_library().snapshot_download(identifier.repository, **settings))
    except (OSError, ValueError):
        raise UserError(f"{_no_connection(reason)}, and '{identifier}' is not in {_cache()}") from None
    names = frozenset(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return _Repository(identifier, folder.name, names, folder, reason)


def _snapshot(identifier: Identifier, patterns: list[str]) -> pathlib.Path:
    hub = _library()
    try:
        settings = dict(revision=identifier.revision, allow_patterns=patterns, tqdm_class=_bar())
        return pathlib.Path(hub.snapshot_download(identifier.repository, **settings))
    except hub.errors.GatedRepoError:
        raise UserError(
            f"'{identifier}' is gated: ask for access at {hub.constants.ENDPOINT}/{identifier.repository},"
            " then `hf auth login`, or HF_TOKEN"
        ) from None
    except Exception as error:  # as above
        raise RunFailed(f"'{identifier}' could not be downloaded: {_line(error)}") from error


def _bar() -> type:
    """The Hub's progress bar, on a terminal only, and gone when it is done."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args, **settings):
            super().__init__(*args, **{**settings, "disable": settings.get("disable") or None, "leave": False})

    return Bar


def _no_connection(reason: str) -> str:
    return f"no connection to {_library().constants.ENDPOINT} ({reason})"


def _cache() -> str:
    return f"the cache at {_library().constants.HF_HUB_CACHE}"


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _library():
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError:
        raise UserError("models of the Hugging Face Hub need huggingface_hub: pip install 'ladder-jax[hf]'") from None
    return huggingface_hub
