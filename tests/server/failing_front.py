"""`edgelm serve` whose engines are those of failing_engine.py: `python -m tests.server.failing_front serve …`."""

from __future__ import annotations

from edgelm.__main__ import main
from edgelm.server.engines import process as engine_process

if __name__ == "__main__":
    engine_process.WORKER = "tests.server.failing_engine"
    main()
