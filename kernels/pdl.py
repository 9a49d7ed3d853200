"""Programmatic dependent launch (PDL): a kernel begins while the kernel before it in the stream still runs.

Owns whether kernels are launched so, and the two instructions that they need. Each kernel has a constexpr `launch_pdl`;
its name is that of Triton's launch option, so one keyword of the launch sets both.

On sm_90 and later, a kernel first lets the next one begin (`griddepcontrol.launch_dependents`), as soon as all its own
programs run, and then waits (`griddepcontrol.wait`) until the kernels that it depends on have ended and all they wrote
is visible. What it does before the wait runs beside the kernel before it. The rules, which the emulator checks
(tests/kernels/ptx/dependents.py):

- Every thread of every program waits, on all paths, before it writes anything, and before it reads a tensor that work
  on the GPU may still be writing.
- Before the wait, it reads only weights: nothing writes them after loading, which ends with a synchronization. Only the
  matmul of a step does so: its first words are under way while the kernel before it ends.

Why that is enough. Let kernels A, B and C follow each other in a stream, all launched so. C may begin before A has
ended, since B lets it. But B ends only after all its programs have waited, that is, after A has ended. C waits for the
end of B, so after its wait A has ended too, and by induction all kernels before it. So reads after the wait see all
writes, and a write after the wait comes after all reads of earlier kernels: memory that torch's allocator gives to one
tensor after another, in a graph or not, needs no more care than without PDL. Where the work before or after such a
kernel is something else (a copy, a kernel of torch, the start or end of a graph), the stream's full order holds: the
attribute of a launch loosens only the edge from the kernel right before it, and a kernel without the attribute begins
after the end of all work before it. In a capture, CUDA keeps the loosened edges as programmatic ones (since CUDA 12.3).

`launch_dependents` can stand first: it promises nothing about memory. CUTLASS, FlashInfer and llama.cpp do the same.
The wait must not stand in a loop: Triton 3.7 moves pipelined loads of the loop before it (triton-lang/triton, issue
11905).
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.choice import PDL, PLAIN_OPS, interpreting
from edgelm.kernels.gpu_target import capability_of

FIRST_CAPABILITY = 90


def uses_pdl() -> bool:
    """Return whether kernels are launched with PDL on the current device."""
    if interpreting() or PDL in PLAIN_OPS:
        return False
    from triton.runtime import driver

    active = driver.active
    return capability_of(active, active.get_current_device()) >= FIRST_CAPABILITY


@triton.jit
def begin_dependent(launch_pdl: tl.constexpr):
    """Let the next kernel begin, and wait for the end of those before: the first statement of a kernel."""
    let_next_begin(launch_pdl)
    wait_for_earlier(launch_pdl)


@triton.jit
def let_next_begin(launch_pdl: tl.constexpr):
    """Let the next kernel begin as soon as all programs of this one have come here."""
    if launch_pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(launch_pdl: tl.constexpr):
    """Wait for the end of the kernels before; the module's docstring says what may stand before this."""
    if launch_pdl:
        tl.extra.cuda.gdc_wait()
