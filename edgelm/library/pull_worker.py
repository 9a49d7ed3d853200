"""The worker of a pull: for the chat, which continues meanwhile and does not import the hub client.

Its messages are those of library/progress.py. When its parent ends it, what was downloaded stays for the next pull.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import replace

from edgelm.base.config import load_config
from edgelm.base.workers.child import Child, run_job
from edgelm.library.catalog import hub_reference, stand_in
from edgelm.library.http_range import CancelledTransferError
from edgelm.library.hub import Hub
from edgelm.library.progress import PullJob
from edgelm.library.pull import CONNECTIONS, pull

STOP_S = 1.0  # to end pip and remove its folder


def _pull(job: PullJob, child: Child) -> None:
    places = load_config({}).places
    reference = hub_reference(job.model)
    if job.revision:
        reference = replace(reference, revision=job.revision)
    hub, other = Hub(places.hub_endpoint, places.hub), None if job.revision else stand_in(job.model)
    cancelled, has_stopped = threading.Event(), threading.Event()

    def stop() -> None:
        cancelled.set()
        has_stopped.wait(STOP_S)

    child.at_end(stop)
    connections = job.connections or CONNECTIONS
    try:
        with suppress(CancelledTransferError):
            pull(reference, hub, child.send, cancelled=cancelled, connections=connections, stand_in=other)
    finally:
        has_stopped.set()


if __name__ == "__main__":
    sys.exit(run_job({PullJob: _pull}))
