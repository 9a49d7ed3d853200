"""The hub as a pull sees it: the files of a repository, their addresses, refusals, and the waits between retries.

Owns the one metadata request of a model, and the error lines for the hub's refusals. The hub client owns names, login,
endpoint, offline mode and the request itself; http_range.py moves the bytes.
"""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx2
from socksio import SOCKSError

from edgelm import __version__
from edgelm.base.errors import EdgeLMError
from edgelm.library.names import shown

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
COMMIT = re.compile(r"[0-9a-f]{40}")
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_BYTES = 2**50  # of one file; a larger size is an error of the hub
MAX_MESSAGE_LEN = 300  # of the hub's own message
TICK_S = 0.5  # a cancelled request ends within this time
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})

PORTAL = "a web page came in place of an answer of {}"
PORTAL_HINT = "log in to the network, if it asks for that in a browser (a captive portal), or correct HF_ENDPOINT"

Answer = TypeVar("Answer")
OnWait = Callable[[str, float], None]  # the reason, and the wait in seconds


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Timeouts and waits in seconds, and the number of consecutive failures after which a request is given up."""

    connect_s: float = 10.0
    metadata_s: float = 30.0
    answer_s: float = 120.0  # for a whole answer about a model, or the headers of a file: each may come bit by bit
    stall_s: float = 30.0  # a transfer with less than `min_bytes` in this time is broken off and resumed
    min_bytes: int = 4096
    max_failures: int = 8  # without progress between them
    max_metadata_failures: int = 4
    first_wait_s: float = 0.5
    max_wait_s: float = 20.0
    max_retry_after_s: float = 300.0  # the longest wait that a server may ask for


class Backoff:
    """The waits between retries: each about twice as long as the one before, with jitter."""

    def __init__(self, policy: RetryPolicy, cancelled: threading.Event, max_failures: int | None = None) -> None:
        self.failures = 0
        self._policy = policy
        self._cancelled = cancelled
        self._max_failures = policy.max_failures if max_failures is None else max_failures

    def reset(self) -> None:
        """Forget the failures after progress."""
        self.failures = 0

    def next_wait_s(self, retry_after_s: float | None = None) -> float | None:
        """Return the wait before the next try; None: too many failures, or the server asks for too long a wait."""
        self.failures += 1
        if self.failures >= self._max_failures:
            return None
        wait_s = min(self._policy.first_wait_s * 2.0 ** (self.failures - 1), self._policy.max_wait_s)
        wait_s *= random.uniform(0.5, 1.0)
        if retry_after_s is None:
            return wait_s
        return max(retry_after_s, wait_s) if retry_after_s <= self._policy.max_retry_after_s else None

    def wait(self, retry_after_s: float | None = None) -> bool:
        """Wait before the next try; return False if there must be none."""
        wait_s = self.next_wait_s(retry_after_s)
        return wait_s is not None and not self._cancelled.wait(wait_s)


class RefusedError(EdgeLMError):
    """The hub refuses the request, and a retry would not help."""


class UnreachableError(EdgeLMError):
    """There is no connection to the hub."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `blob` is its name in the cache and its hash: SHA-256, or git's SHA-1 of a small file."""

    path: str  # inside the repository, with slashes
    size: int  # bytes
    blob: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    repository: str  # as the hub spells it
    revision: str  # as requested: a branch, a tag or the commit
    commit: str
    files: tuple[HubFile, ...]
    licence: str = ""  # from the model card
    new_name: str = ""  # of a repository that was renamed


@dataclass(frozen=True, slots=True)
class Hub:
    """One hub and its cache folder on this disk."""

    endpoint: str
    cache: Path
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def list_files(
        self, repository: str, revision: str | None, cancelled: threading.Event, on_wait: OnWait | None = None
    ) -> Listing:
        """List a repository's files with sizes and hashes, in one request. `on_wait` is called before each retry.

        Raises EdgeLMError if the hub refuses, cannot be reached, or sends an impossible answer.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings would break the progress line
        _require_session()
        api = HfApi(endpoint=self.endpoint, library_name="edgelm", library_version=__version__)
        backoff = Backoff(self.retry, cancelled, self.retry.max_metadata_failures)
        limit_s = self.retry.metadata_s
        while True:
            retry_after_s = None
            try:
                info = within(
                    self.retry.answer_s,
                    cancelled,
                    lambda: api.model_info(repository, revision=revision, files_metadata=True, timeout=limit_s),
                )
                return _listing(info, repository, revision or "main")
            except HFValidationError:
                raise RefusedError(f"{repository} is not a repository name", "give OWNER/NAME") from None
            except OfflineModeIsEnabled:
                hint = "unset it, or use the files on this disk with --offline"
                raise RefusedError("HF_HUB_OFFLINE is set", hint) from None
            except HfHubHTTPError as error:
                status, headers = error.response.status_code, error.response.headers
                failure: EdgeLMError = self.refusal(status, headers, repository, revision)
                if status not in RETRIED:
                    raise failure from None
                reason, retry_after_s = f"HTTP {status}", parse_retry_after(headers)
            except httpx2.UnsupportedProtocol:
                raise EdgeLMError(f"{self.endpoint} is not the address of a hub", "correct HF_ENDPOINT") from None
            except (httpx2.HTTPError, SOCKSError) as error:
                failure, reason = self.unreachable(error), failure_reason(error)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self._unusable(error) from None
            wait_s = backoff.next_wait_s(retry_after_s)
            if wait_s is None:
                raise failure
            if on_wait is not None:
                on_wait(reason, wait_s)
            if cancelled.wait(wait_s):
                raise failure

    @property
    def host(self) -> str:
        return httpx2.URL(self.endpoint).netloc.decode() or self.endpoint

    def url(self, listing: Listing, path: str) -> str:
        """Return the address of a file of a listing."""
        return f"{self.endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(path)}"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request to the hub, login included: never send them to another host."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        return dict(build_hf_headers(library_name="edgelm", library_version=__version__))

    def refusal(
        self, status: int, headers: Mapping[str, str], repository: str, revision: str | None = None
    ) -> RefusedError:
        """Return the error for a refusal of the hub: what happened, and what to do."""
        code = headers.get("x-error-code", "")
        message = shown(headers["x-error-message"], MAX_MESSAGE_LEN) if headers.get("x-error-message") else ""
        page = f"{self.endpoint}/{repository}"
        if code == "GatedRepo":
            return self._gated(repository)
        if code == "RevisionNotFound":
            return RefusedError(
                f"{repository} has no revision {revision}", f"its branches and tags are at {page}/tree/main"
            )
        if code == "EntryNotFound":
            return RefusedError(f"a file of {repository} no longer exists", "run it again")
        if "disabled" in message:
            return RefusedError(f"the hub has disabled {repository}", "choose another repository")
        if status == 401 and "credentials" in message:
            return RefusedError(f"{self.host} does not accept your token", LOG_IN.replace("log in", "log in again"))
        if status in (401, 403, 404):
            return self._hidden(repository, status)
        if status == 511:
            return RefusedError(PORTAL.format(self.host), PORTAL_HINT)
        if status == 429:
            return RefusedError(f"{self.host} limits the request rate (HTTP 429)", "wait some minutes and run it again")
        if status >= 500:
            return RefusedError(f"{self.host} failed (HTTP {status})", "run it again later")
        return RefusedError(f"{self.host} answers HTTP {status} for {repository}", message or "run it again later")

    def refusal_elsewhere(self, status: int, headers: Mapping[str, str], repository: str, origin: str) -> RefusedError:
        """Return the error for a refusal of another host, to which this hub redirects and which gets no login."""
        there = shown(origin)
        page = f"{there}/{repository}"
        if headers.get("x-error-code") == "GatedRepo":
            message = f"{repository} is gated: {self.host} redirects to {there}, which gets no login"
            return RefusedError(message, f"accept its licence at {page}, then set HF_ENDPOINT={there} and {LOG_IN}")
        message = f"{there}, to which {self.host} redirects, refuses {repository} (HTTP {status})"
        if names_error(headers):
            hint = f"if it is private or gated, set HF_ENDPOINT={there} and {LOG_IN}; accept its licence at {page}"
            return RefusedError(message, hint)
        return RefusedError(message, "run it again later, or set another HF_ENDPOINT")

    def _gated(self, repository: str) -> RefusedError:
        page = f"{self.endpoint}/{repository}"
        if self._has_login():
            hint = f"accept its licence at {page} as the token's user, and let the token read gated repositories"
            return RefusedError(f"{repository} is gated, and your token has no access to it", hint)
        return RefusedError(f"{repository} is gated", f"accept its licence at {page}, then {LOG_IN}")

    def _hidden(self, repository: str, status: int) -> RefusedError:
        if self._has_login():
            message = f"{self.host} does not show {repository} to the user of your token (HTTP {status})"
            return RefusedError(message, "check the name, and that the token may read it; or accept its licence there")
        if status == 403:
            hint = f"accept its licence at {self.endpoint}/{repository} if it has one, and {LOG_IN}"
            return RefusedError(f"{self.host} forbids access to {repository} (HTTP 403)", hint)
        hint = f"check the name; if it is private or gated, {LOG_IN}"
        return RefusedError(f"{self.host} does not show {repository} (HTTP {status})", hint)

    def _has_login(self) -> bool:
        return "authorization" in {name.lower() for name in self.headers()}

    def _unusable(self, error: Exception) -> EdgeLMError:
        """Return the error for a request that could not be made, or an answer that a hub would not send."""
        if isinstance(error, OSError):
            message = f"{error.filename or 'the login'} cannot be read: {error.strerror or error}"
            return EdgeLMError(message, "correct its permissions, or set HF_TOKEN")
        if isinstance(error, UnicodeEncodeError):  # in a header: only the token comes from the user
            return EdgeLMError("the token has characters that a hub token cannot have", LOG_IN)
        if isinstance(error, json.JSONDecodeError) and error.doc.lstrip().startswith("<"):
            return EdgeLMError(PORTAL.format(self.host), PORTAL_HINT)
        return EdgeLMError(f"{self.host} does not answer like a hub: {error}", "check HF_ENDPOINT")

    def unreachable(self, error: httpx2.HTTPError | SOCKSError) -> EdgeLMError:
        """Return the error for a connection that failed."""
        hint = "check the network and the proxy; --offline uses the files on this disk"
        return UnreachableError(f"{self.host} cannot be reached: {failure_reason(error)}", hint)


def within(
    limit_s: float,
    cancelled: threading.Event,
    action: Callable[[], Answer],
    close: Callable[[Answer], object] | None = None,
) -> Answer:
    """Return what `action` returns, on a thread that is given up after a time, or when cancelled.

    The HTTP library limits each read, so that an answer of one byte now and then never ends. A late answer is closed.
    Raises ReadTimeout.
    """
    box: list[Answer | Exception] = []
    done, given_up = threading.Event(), threading.Event()

    def run() -> None:
        try:
            answer = action()
            box.append(answer)
            if given_up.is_set() and close is not None:
                close(answer)
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            box.append(error)
        done.set()

    threading.Thread(target=run, name="request", daemon=True).start()
    deadline = time.monotonic() + limit_s
    while not done.wait(TICK_S):
        if time.monotonic() >= deadline or cancelled.is_set():
            given_up.set()
            raise httpx2.ReadTimeout("the answer timed out")
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def names_error(headers: Mapping[str, str]) -> bool:
    """Return whether a hub says why it refuses."""
    return bool(headers.get("x-error-code") or headers.get("x-error-message"))


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait that a server asks for: `Retry-After` in seconds or as a date, or the hub's `ratelimit`."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    value = headers.get("retry-after", "").strip()
    try:
        if value.isascii() and value.isdigit():
            return float(value)
        if value:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        limit = parse_ratelimit_headers(headers)
    except (ValueError, OverflowError):  # neither a number nor a possible date
        return None
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def failure_reason(error: Exception) -> str:
    """Return why a request failed, in a few words."""
    if isinstance(error, httpx2.ConnectTimeout):
        return "the connection timed out"
    if isinstance(error, httpx2.TimeoutException):
        return "the answer timed out"
    if isinstance(error, SOCKSError):  # from the package below httpx2, for a reply that is cut off or is not SOCKS
        return "the SOCKS proxy does not answer like one"
    text = re.sub(r"\[Errno -?\d+\] ?", "", " ".join(str(error).split()))
    return text[:200] or "the connection broke"


def is_inside(path: str) -> bool:
    """Return whether an untrusted path stays inside the folder that it is joined to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts


def _listing(info: ModelInfo, repository: str, revision: str) -> Listing:
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise ValueError(f"the commit of {repository} is missing")
    files = tuple(_file(sibling) for sibling in info.siblings or () if _is_printable(sibling.rfilename))
    card: Any = info.card_data
    licence = card.get("license") if card is not None else None
    # A renamed repository is cached under the requested name, which other tools will ask for too.
    name = info.id if info.id.lower() == repository.lower() else repository
    new_name = shown(info.id) if name == repository and info.id.lower() != repository.lower() else ""
    return Listing(name, revision, info.sha, files, licence if isinstance(licence, str) else "", new_name)


def _file(sibling: RepoSibling) -> HubFile:
    path = sibling.rfilename
    if not is_inside(path):
        raise ValueError(f"a file named {path!r}")
    size = sibling.size if sibling.lfs is None else sibling.lfs.size
    blob = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    if not isinstance(size, int) or not 0 <= size <= MAX_BYTES or not isinstance(blob, str) or not BLOB.fullmatch(blob):
        raise ValueError(f"{path} has no size and hash")
    return HubFile(path, size, blob)


def _is_printable(path: str) -> bool:
    """Return whether a file can be shown and requested; a picture with an odd name must not block the model."""
    return path.isprintable() and "\\" not in path


def _require_session() -> None:
    """Let the hub client apply the environment's proxy and certificates. Raises EdgeLMError if they are wrong."""
    from huggingface_hub import get_session

    try:
        get_session()
    except (OSError, ValueError, httpx2.InvalidURL) as error:
        message = f"the proxy or certificate settings are wrong: {failure_reason(error)}"
        raise EdgeLMError(message, "correct HTTPS_PROXY and the like, or SSL_CERT_FILE") from None
