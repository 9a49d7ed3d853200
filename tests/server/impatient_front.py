"""`edgelm serve` that notices a frozen engine after 2 s, keeps connections to an engine for half a second, and looks
after its own files all the time.

python -m tests.server.impatient_front serve …
"""

from __future__ import annotations

from edgelm.__main__ import main
from edgelm.server import upkeep
from edgelm.server.engines import process

KEPT_S = 0.5

if __name__ == "__main__":
    process.FROZEN_S, process.TICK_S = 2.0, 1.0  # a tick that comes late by another one does not count
    process.KEPT_S = KEPT_S
    upkeep.CHECK_S = 0.1
    main()
