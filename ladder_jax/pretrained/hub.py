"""The Hugging Face Hub: downloads those files of a model that are read, into the Hub's cache, and
uploads exports.
"""

import contextlib
import dataclasses
import functools
import glob
import os
import pathlib
import re
import sys

from ladder_jax.config.fields import check_type
from ladder_jax.errors import RunFailed, UserError, needed, refused
from ladder_jax.files import local_path, reason
from ladder_jax.pretrained.huggingface import folder as huggingface
from ladder_jax.pretrained.source import REFIT

PREFIX = "hf://"
_PART = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"({_PART}/{_PART})(?:/([^@]+\.gguf))?(?:@(.+))?", re.ASCII)
_FOLDER = (
    huggingface.CONFIG,
    huggingface.GENERATION,
    REFIT,
    *huggingface.TOKENIZER_FILES,
    huggingface.INDEX,
)
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")


@dataclasses.dataclass(frozen=True)
class Identifier:
    """`org/name[@revision]`; with `file`, `org/name/FILE.gguf[@revision]`. `hf://` may stand before
    it.
    """

    repository: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> "Identifier | None":
        """None for what is no identifier, such as `model.gguf` or `a/b/c`."""
        match = _ID.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            return None
        found = cls(*match.groups())
        if found.file is None and found.repository.endswith((".gguf", ".safetensors")):
            return None
        return found

    def __str__(self) -> str:
        text = self.repository
        if self.file:
            text += f"/{self.file}"
        if self.revision:
            text += f"@{self.revision}"
        return text


@functools.cache  # asks once a process: a branch that moves meanwhile must not mix two models
def download(identifier: Identifier, *, weights: bool = True) -> tuple[pathlib.Path, Identifier]:
    """The Hugging Face folder or GGUF file of that name in the Hub's cache, and the identifier with
    its commit.

    Downloads what is read of it and is not there yet: not the formats of other programs. weights:
    False for the configuration alone (of a GGUF file, which holds both, everything). The token is
    the Hub's own: HF_TOKEN, or `hf auth login`'s. Without a connection, the cache is used; a
    UserError says so if it lacks a file.
    """
    file = identifier.file
    wanted = [glob.escape(file or huggingface.CONFIG)]
    if weights and not file:
        wanted = [*_FOLDER, *_WEIGHTS]
    folder = _snapshot(identifier, wanted)
    if (folder / (file or huggingface.CONFIG)).is_file():
        if file or not weights or any(folder.glob("*.safetensors")):
            return folder / (file or ""), dataclasses.replace(identifier, revision=folder.name)
    ggufs = _ggufs(identifier, folder)
    if len(ggufs) == 1 and not file:
        return download(dataclasses.replace(identifier, file=ggufs[0]), weights=weights)
    missing = file or f"{huggingface.CONFIG} with safetensors"
    instead = ", ".join(f"{identifier.repository}/{name}" for name in ggufs)
    raise UserError(
        f"'{identifier}' holds no {missing}; name one of its GGUF files: {instead or 'it has none'}"
    )


def repository_of(name: str) -> str:
    """`org/name` of a repository to upload into. Raises UserError for another name, and without the
    Hub's library.
    """
    _library()
    check_type("repository", name, str)
    identifier = Identifier.parse(name)
    if identifier is None or identifier.file or identifier.revision:
        raise UserError(f"{name!r} is no repository's name: write org/name")
    return identifier.repository


def push(
    folder: str | os.PathLike,
    repository: str,
    *,
    private: bool | None = None,
    message: str | None = None,
) -> str:
    """Upload an exported folder to the Hub, into a repository that is created if there is none.
    Returns the URL.

    private: of a new repository; None: the account's default. Raises UserError for a folder that is
    no export and a name that is none, RunFailed if the Hub refuses it or does not answer.
    """
    hub = _library()
    repository = repository_of(repository)
    folder = local_path(folder)
    if not (folder / huggingface.CONFIG).is_file():
        raise UserError(f"{str(folder)!r} is no export: it holds no {huggingface.CONFIG}")
    try:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message or "Upload by ladder_jax",
        )
    except Exception as error:  # of the client's HTTP library, which differs between its versions
        raise RunFailed(f"{repository!r} could not be uploaded: {reason(error)}") from error
    return str(done.commit_url).partition("/commit/")[0]


def _snapshot(identifier: Identifier, wanted: list[str]) -> pathlib.Path:
    """The folder of one commit in the Hub's cache, with the files of these patterns."""
    hub = _library()
    hub.utils.logging.set_verbosity_error()  # it warns where it finds none of the files
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    with _asking(identifier):
        found = hub.snapshot_download(
            identifier.repository, revision=identifier.revision, allow_patterns=wanted
        )
    return pathlib.Path(found)


def _asking(identifier: Identifier) -> contextlib.AbstractContextManager[None]:
    """Whatever the Hub's client raises, also its HTTP library, becomes a UserError."""
    endpoint = _library().constants.ENDPOINT
    return refused(f"there is no model {str(identifier)!r} here, and {endpoint} does not give it")


def _ggufs(identifier: Identifier, folder: pathlib.Path) -> list[str]:
    """The repository's GGUF files; without a connection, those in the cache. Raises UserError where
    there are none: an older huggingface_hub gives a folder that lacks files as if it were whole.
    """
    with _asking(identifier):
        try:
            names = _library().HfApi().list_repo_files(identifier.repository, revision=folder.name)
        except Exception:  # of the client's HTTP library
            names = os.listdir(folder)
            if not any(name.endswith(".gguf") for name in names):
                raise
    return sorted(name for name in names if name.endswith(".gguf"))


def _library():
    with needed("models of the Hugging Face Hub need huggingface_hub", extra="hf"):
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    return huggingface_hub
