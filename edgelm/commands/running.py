"""The running server as the commands see it: its state, and requests to it with errors as one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from edgelm.base.config import Config
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.runtime import FrontRecord, find_front
from edgelm.library.local import runnable_model
from edgelm.library.names import shown
from edgelm.library.scan import LocalModel, printable

REQUEST_LIMIT_S = 5.0


def require_front(config: Config) -> FrontRecord:
    """Return the running server. Raises EdgeLMError if there is none."""
    front = find_front(config.places.runtime, config.library)
    if front is None:
        raise EdgeLMError("no edgelm server is running", "start one with `edgelm serve`")
    return front


def model_or_served(
    name: str, config: Config, find: Callable[[str, Config], LocalModel] = runnable_model
) -> LocalModel:
    """Return a model of this machine, or the file that the running server offers by this name.

    Raises ModelError, which says so where another server runs the model.
    """
    try:
        return find(name, config)
    except ModelError:
        refuse_remote(name, config)
        front = find_front(config.places.runtime, config.library)
        if front is None:
            raise
        try:
            known = ask_front(front, "GET", f"/v1/models/{quote(name)}")["edgelm"]
            path, where = str(known.get("path", "")), str(known.get("remote", ""))
        except (EdgeLMError, KeyError, TypeError, AttributeError):
            path = where = ""  # it knows no such model either, or does not tell
        if where:
            raise _elsewhere(name, where) from None
        if not path:
            raise
        return find(path, config)


def refuse_remote(name: str, config: Config) -> None:
    """Raise ModelError for a model that the configuration has on another server."""
    if (table := config.remote_model(name)) is not None and table.remote is not None:
        raise _elsewhere(name, table.remote.endpoints[0])


def _elsewhere(name: str, where: str) -> ModelError:
    message = f"{shown(name)} runs on another server ({where}): its files are not on this machine"
    return ModelError(message, "`edgelm list` shows the models that are here")


def served_name(front: FrontRecord, model: LocalModel) -> str | None:
    """Return the name by which the server offers the file of a model, None if it does not. Raises EdgeLMError."""
    listed = [entry for entry in ask_front(front, "GET", "/v1/models")["data"] if "alias_of" not in entry["edgelm"]]
    path = printable(str(model.path))
    return next((str(entry["id"]) for entry in listed if entry["edgelm"].get("path") == path), None)


def get_state(front: FrontRecord) -> dict[str, Any]:
    """Return the server's state, from GET /edgelm/ps. Raises EdgeLMError."""
    return ask_front(front, "GET", "/edgelm/ps")


def ask_front(
    front: FrontRecord, method: str, path: str, body: dict[str, Any] | None = None, *, limit_s: float = REQUEST_LIMIT_S
) -> dict[str, Any]:
    """Send a request to the server, and return its answer. Raises EdgeLMError, with the server's own message."""
    import httpx2  # late: most commands ask no server

    address = front.address
    try:
        with httpx2.Client(
            timeout=httpx2.Timeout(limit_s, connect=REQUEST_LIMIT_S),
            trust_env=False,
            headers=front.headers,
            verify=front.tls(),
        ) as client:
            response = client.request(method, f"{address}{path}", json=body)
    except httpx2.HTTPError as error:
        raise EdgeLMError(f"the edgelm server at {address} does not answer: {error}", "see its output") from None
    if response.status_code == 401:
        raise EdgeLMError(f"the edgelm server at {address} refuses its own key", "start it again")
    try:
        answer: dict[str, Any] = response.json()
        if response.status_code != 200:
            raise EdgeLMError(str(answer["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        raise EdgeLMError(f"{address} answers {response.status_code}: is it an edgelm server?") from None
    return answer
