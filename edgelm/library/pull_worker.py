"""The worker of a pull: for the chat, which continues meanwhile and does not import the hub client.

Its messages are those of library/progress.py. When its parent ends it, what was downloaded stays for the next pull.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from edgelm.config import load_config
from edgelm.library.catalog import hub_reference, stand_in
from edgelm.library.hub import Hub
from edgelm.library.progress import PullJob
from edgelm.library.pull import CONNECTIONS, pull
from edgelm.workers.child import Child, run_job


def _pull(job: PullJob, child: Child) -> None:
    places = load_config({}).places
    reference = hub_reference(job.model)
    if job.revision:
        reference = replace(reference, revision=job.revision)
    hub, other = Hub(places.hub_endpoint, places.hub), None if job.revision else stand_in(job.model)
    pull(reference, hub, child.send, connections=job.connections or CONNECTIONS, stand_in=other)


if __name__ == "__main__":
    sys.exit(run_job({PullJob: _pull}))
