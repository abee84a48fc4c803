"""The Hugging Face Hub: downloads those files of a model that are read, into the Hub's cache, and
uploads exports.
"""

import dataclasses
import functools
import glob
import pathlib
import re
import sys

from ladder_jax.errors import RunFailed, UserError, needed
from ladder_jax.files import reason
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
_WEIGHTS = ("model.safetensors", "*-of-*.safetensors")
_OTHERS = ("*/*", "consolidated*")  # other programs' formats


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
    if identifier.file:
        folder = _snapshot(identifier, allow_patterns=[glob.escape(identifier.file)])
        file = folder / identifier.file
        if not file.is_file():
            allowed = _listed(_files(identifier, folder, (".gguf",)))
            raise UserError(
                f"'{identifier}': there is no such file in {identifier.repository}{allowed}"
            )
        return file, dataclasses.replace(identifier, revision=folder.name)
    wanted = [*_FOLDER, *_WEIGHTS] if weights else [huggingface.CONFIG]
    folder = _snapshot(identifier, allow_patterns=wanted, ignore_patterns=list(_OTHERS))
    has_config = (folder / huggingface.CONFIG).is_file()
    if has_config and (not weights or any(folder.glob("*.safetensors"))):
        return folder, dataclasses.replace(identifier, revision=folder.name)
    ggufs = _files(identifier, folder, (".gguf",))
    if ggufs:
        first = dataclasses.replace(identifier, file=ggufs[0])
        if len(ggufs) == 1 and not has_config:
            return download(first, weights=weights)
        what = "no safetensors" if has_config else "several models"
        why = f"{what}: name one of its GGUF files, as in '{first}'{_listed(ggufs)}"
    elif _files(identifier, folder, huggingface.PICKLES):
        why = "only weights as pickles, which can run any program when they are opened"
    else:
        missing = "safetensors" if has_config else huggingface.CONFIG
        why = f"no {missing} and no GGUF file: no model that we can read"
    raise UserError(f"'{identifier}' holds {why}")


def push(
    folder: pathlib.Path,
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
    identifier = Identifier.parse(repository)
    if identifier is None or identifier.file or identifier.revision:
        raise UserError(f"{repository!r} is no repository's name: write org/name")
    if not (folder / huggingface.CONFIG).is_file():
        raise UserError(f"{str(folder)!r} is no export: it holds no {huggingface.CONFIG}")
    try:
        api = hub.HfApi()
        api.create_repo(identifier.repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=identifier.repository,
            folder_path=folder,
            commit_message=message or "Upload by ladder_jax",
        )
    except Exception as error:  # of the client's HTTP library, which differs between its versions
        raise RunFailed(f"{repository!r} could not be uploaded: {reason(error)}") from error
    return str(done.commit_url).partition("/commit/")[0]


def _snapshot(identifier: Identifier, **patterns: list[str]) -> pathlib.Path:
    """The folder of one commit in the Hub's cache, with the files of these patterns."""
    hub = _library()
    errors = hub.errors
    there = hub.constants.ENDPOINT
    log_in = "`hf auth login`, or HF_TOKEN"
    hub.utils.logging.set_verbosity_error()  # it warns where it finds none of the files
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        found = hub.snapshot_download(
            identifier.repository, revision=identifier.revision, **patterns
        )
    except errors.RevisionNotFoundError:
        raise UserError(
            f"'{identifier}': the Hub has no revision {identifier.revision!r} of it"
        ) from None
    except errors.GatedRepoError:
        address = f"{there}/{identifier.repository}"
        raise UserError(
            f"'{identifier}' is gated: ask for access at {address}, then {log_in}"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(
            f"there is no model {str(identifier)!r}: no such path here, and no such repository at {there} for you"
            f" (for private ones: {log_in})"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"no connection to {there} ({reason(error)}), and the cache at"
            f" {hub.constants.HF_HUB_CACHE} does not hold all of '{identifier}' that is needed"
        ) from None
    except Exception as error:  # of the client's HTTP library
        raise RunFailed(f"'{identifier}' could not be downloaded: {reason(error)}") from error
    return pathlib.Path(found)


def _files(identifier: Identifier, folder: pathlib.Path, endings: tuple[str, ...]) -> list[str]:
    """The repository's files with such names; without a connection, those in the cache."""
    try:
        names = _library().HfApi().list_repo_files(identifier.repository, revision=folder.name)
    except Exception:  # of the client's HTTP library
        names = [str(file.relative_to(folder)) for file in folder.rglob("*")]
    return sorted(name for name in names if name.endswith(endings))


def _listed(files: list[str]) -> str:
    if not files:
        return ""
    return f" (allowed: {', '.join(files)})"


def _library():
    with needed("models of the Hugging Face Hub need huggingface_hub", extra="hf"):
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    return huggingface_hub
