"""`edgelm serve` whose engines are those of failing_engine.py: `python -m tests.server.failing_front serve …`."""

from __future__ import annotations

from edgelm.__main__ import main
from edgelm.server.engines import link as engine_link

if __name__ == "__main__":
    engine_link.WORKER = "tests.server.failing_engine"
    main()
