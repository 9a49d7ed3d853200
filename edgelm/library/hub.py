"""The hub, as seen by a pull: what a repository holds, and where its bytes are.

Owns the one metadata request of a model, and the hub's refusals as lines that say what to do. Names, login, endpoint,
offline mode and the request itself are the hub client's; moving the bytes is transfer.py's.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2
from socksio import SOCKSError

from edgelm import __version__
from edgelm.errors import EdgeLMError
from edgelm.library.names import shown
from edgelm.library.patience import Backoff, Patience, retry_after_s

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
COMMIT = re.compile(r"[0-9a-f]{40}")
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_BYTES = 2**50  # of one file: more is no size
MAX_SAID = 300  # characters of what the hub says itself
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})

OnWait = Callable[[str, float], None]  # the reason, and for how many seconds


class RefusedError(EdgeLMError):
    """The hub does not give what was asked for, and asking again would not help."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `blob` is its name in the cache and its hash: SHA-256, or git's SHA-1 of a small file."""

    path: str  # inside the repository, with slashes
    size: int  # bytes
    blob: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit."""

    repository: str  # as the hub spells it
    revision: str  # what was asked for: a branch, a tag or the commit
    commit: str
    files: tuple[HubFile, ...]
    licence: str = ""  # as the model card has it


@dataclass(frozen=True, slots=True)
class Hub:
    """One hub and the cache folder on this disk that goes with it."""

    endpoint: str
    cache: Path
    patience: Patience = field(default_factory=Patience)

    def list_files(
        self, repository: str, revision: str | None, cancelled: threading.Event, on_wait: OnWait | None = None
    ) -> Listing:
        """Ask for the files of a repository with sizes and hashes: one request. `on_wait` hears why it is tried again.

        Raises EdgeLMError where the hub refuses, cannot be reached, or answers what cannot be true.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings would break the moving display
        _require_session()
        api = HfApi(endpoint=self.endpoint, library_name="edgelm", library_version=__version__)
        backoff = Backoff(self.patience, cancelled, self.patience.metadata_failures)
        while True:
            asked_s = None
            try:
                limit_s = self.patience.metadata_s
                info = api.model_info(repository, revision=revision, files_metadata=True, timeout=limit_s)
                return _listing(info, repository, revision or "main")
            except HFValidationError:
                raise RefusedError(f"{repository} is no name of a repository", "give OWNER/NAME") from None
            except OfflineModeIsEnabled:
                raise RefusedError("HF_HUB_OFFLINE is set", "unset it, or take what is here with --offline") from None
            except HfHubHTTPError as error:
                status, headers = error.response.status_code, error.response.headers
                failure: EdgeLMError = self.refusal(status, headers, repository, revision)
                if status not in RETRIED:
                    raise failure from None
                why, asked_s = f"HTTP {status}", retry_after_s(headers)
            except httpx2.UnsupportedProtocol:
                raise EdgeLMError(f"{self.endpoint} is no address of a hub", "correct HF_ENDPOINT") from None
            except (httpx2.HTTPError, SOCKSError) as error:
                failure, why = self.unreachable(error), reason(error)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self._useless(error) from None
            wait_s = backoff.next_wait_s(asked_s)
            if wait_s is None:
                raise failure
            if on_wait is not None:
                on_wait(why, wait_s)
            if cancelled.wait(wait_s):
                raise failure

    @property
    def host(self) -> str:
        return httpx2.URL(self.endpoint).netloc.decode() or self.endpoint

    def url(self, listing: Listing, path: str) -> str:
        """Return where a file of a listing is fetched from."""
        return f"{self.endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(path)}"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request to the hub itself, the login included: never for another host."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        return dict(build_hf_headers(library_name="edgelm", library_version=__version__))

    def refusal(
        self, status: int, headers: Mapping[str, str], repository: str, revision: str | None = None
    ) -> RefusedError:
        """Return the hub's answer as an error: what happened, and what to do."""
        code = headers.get("x-error-code", "")
        said = shown(headers["x-error-message"], MAX_SAID) if headers.get("x-error-message") else ""
        page = f"{self.endpoint}/{repository}"
        if code == "GatedRepo":
            return RefusedError(f"{repository} is gated", f"accept its licence at {page}, then {LOG_IN}")
        if code == "RevisionNotFound":
            return RefusedError(
                f"{repository} has no revision {revision}", f"its branches and tags are at {page}/tree/main"
            )
        if code == "EntryNotFound":
            return RefusedError(f"a file of {repository} is no longer there", "run it again")
        if "disabled" in said:
            return RefusedError(f"{repository} is disabled by the hub", "take another repository")
        if status == 401 and "credentials" in said:
            return RefusedError(f"{self.host} does not accept your token", LOG_IN.replace("log in", "log in again"))
        if status in (401, 404):
            hint = f"check the name; if it is private or gated, {LOG_IN}"
            return RefusedError(f"{self.host} shows no {repository} (HTTP {status})", hint)
        if status == 403:
            hint = f"accept its licence at {page} if it has one, and {LOG_IN}"
            return RefusedError(f"{self.host} forbids access to {repository} (HTTP 403)", hint)
        if status == 429:
            return RefusedError(f"{self.host} asks to slow down (HTTP 429)", "wait some minutes and run it again")
        if status >= 500:
            return RefusedError(f"{self.host} fails (HTTP {status})", "run it again later")
        return RefusedError(f"{self.host} answers HTTP {status} for {repository}", said or "run it again later")

    def _useless(self, error: Exception) -> EdgeLMError:
        """Return why no request could be made, or why its answer is none of a hub."""
        if isinstance(error, OSError):
            message = f"{error.filename or 'the login'} cannot be read: {error.strerror or error}"
            return EdgeLMError(message, "correct its permissions, or set HF_TOKEN")
        if isinstance(error, UnicodeEncodeError):  # of a header: nothing else in them is the user's
            return EdgeLMError("the token has characters that no token of the hub has", LOG_IN)
        return EdgeLMError(f"{self.host} does not answer as a hub does: {error}", "check HF_ENDPOINT")

    def unreachable(self, error: httpx2.HTTPError | SOCKSError) -> EdgeLMError:
        """Return a connection that did not come about as an error."""
        hint = "check the network and the proxy; --offline takes what is here"
        return EdgeLMError(f"{self.host} cannot be reached: {reason(error)}", hint)


def reason(error: Exception) -> str:
    """Return why a request failed, in a few words."""
    if isinstance(error, httpx2.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time"
    if isinstance(error, SOCKSError):  # as the package below httpx2 raises it: of a reply that is cut off or is none
        return "the SOCKS proxy does not answer as one"
    text = re.sub(r"\[Errno -?\d+\] ?", "", " ".join(str(error).split()))
    return text[:200] or "the connection broke"


def _listing(info: ModelInfo, repository: str, revision: str) -> Listing:
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise ValueError(f"the commit of {repository} is missing")
    files = tuple(_file(sibling) for sibling in info.siblings or () if _can_be_named(sibling.rfilename))
    card: Any = info.card_data
    licence = card.get("license") if card is not None else None
    # Under another name it was renamed: the cache has it as it was asked for, which is how others will ask too.
    name = info.id if info.id.lower() == repository.lower() else repository
    return Listing(name, revision, info.sha, files, licence if isinstance(licence, str) else "")


def _file(sibling: RepoSibling) -> HubFile:
    path = sibling.rfilename
    if not is_inside(path):
        raise ValueError(f"a file named {path!r}")
    size = sibling.size if sibling.lfs is None else sibling.lfs.size
    blob = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    if not isinstance(size, int) or not 0 <= size <= MAX_BYTES or not isinstance(blob, str) or not BLOB.fullmatch(blob):
        raise ValueError(f"{path} has no size and hash")
    return HubFile(path, size, blob)


def is_inside(path: str) -> bool:
    """Return whether a path of someone else's making stays inside the folder that it is joined to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts


def _can_be_named(path: str) -> bool:
    """Tell whether a file may be shown and asked for; a picture with an odd name is no reason to refuse the model."""
    return path.isprintable() and "\\" not in path


def _require_session() -> None:
    """Let the hub client make its connections as the environment has it. Raises EdgeLMError where that is wrong."""
    from huggingface_hub import get_session

    try:
        get_session()
    except (OSError, ValueError, httpx2.InvalidURL) as error:
        message = f"no connection can be made as the environment has it: {reason(error)}"
        raise EdgeLMError(message, "correct HTTPS_PROXY and the like, or SSL_CERT_FILE") from None
