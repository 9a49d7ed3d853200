"""`edgelm serve` that notices a frozen engine within 2 s: `python -m tests.server.impatient_front serve …`."""

from __future__ import annotations

from edgelm.__main__ import main
from edgelm.server.engines import process

if __name__ == "__main__":
    process.FROZEN_S, process.TICK_S = 2.0, 0.2
    main()
