"""The worker of `edgelm quantize --to int4…`: torch runs and ends in a process of its own.

Its messages are in int4_job.py. When its parent ends it, the layers that are finished stay for the same command.
"""

from __future__ import annotations

import sys

from edgelm.base.workers.child import Child, run_job
from edgelm.making.quantization.int4_job import Int4Job


def _quantize(job: Int4Job, child: Child) -> None:
    import torch

    from edgelm.backends.torch.failures import gpu_errors
    from edgelm.base.machine.cpu import usable_cores
    from edgelm.making.quantization.int4_model import quantize_folder

    torch.set_num_threads(job.threads or usable_cores().physical)
    with gpu_errors():
        child.send(quantize_folder(job, child.send))


if __name__ == "__main__":
    sys.exit(run_job({Int4Job: _quantize}))
