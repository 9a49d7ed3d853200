"""The description of a kernel that is compiled without a GPU, and the call of Triton's compiler.

Owns `CompileCase`, the list of all ops' cases and `compile_for`. Knows nothing of how the machine code is judged: that
is tests/kernels/sass.py.

An op lists its kernels in `compile_cases()` of tests/kernels/cases/<op>.py and imports them inside that function: they
exist only where Triton is installed, and compile only if TRITON_INTERPRET was not set when they were imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, NamedTuple

import tests.kernels.cases


class CompileCase(NamedTuple):
    """A kernel with everything that its machine code depends on, except the GPU."""

    name: str  # op first: "matmul q4_k rows=8"
    fn: Any  # a triton.JITFunction
    signature: dict[str, str]  # every argument but launch_pdl: "*fp16", "*i32", "i32", "fp32", ..., "constexpr"
    constants: dict[str, object]  # values of the constexprs, and of arguments that are fixed (None, 1)
    divisible: tuple[str, ...] = ()  # arguments divisible by 16, as those of aligned tensors are at a launch
    num_warps: int = 4
    options: Mapping[str, object] = MappingProxyType({})  # num_stages, maxnreg, enable_fp_fusion (True)
    most_registers: Mapping[int, int] = MappingProxyType({})  # maxnreg where it depends on the compute capability
    loop_weights: int = 0  # elements that one thread handles in one iteration of the main loop; 0: not counted
    budget: float | None = None  # maximum instructions of a thread per element in the main loop, on sm_90
    spills: int = 0  # most instructions that may spill registers
    spills_on: Mapping[int, int] = MappingProxyType({})  # the same where it depends on the compute capability
    loop_spills: int | None = None  # of these, in the main loop; None: all
    wide_loads: bool = True  # the main loop reads its weights, or its keys and values, 16 bytes at a time
    differs_on: tuple[int, ...] = ()  # targets for which releases of Triton make code that differs in quality
    own_warps: bool = False  # in the loop that runs longest, no warp needs what another one has
    main: bool = True  # may be one of the few cases that every test run compiles; False: with --soak only


def op_names() -> list[str]:
    """Return the ops that have cases: the modules of tests/kernels/cases."""
    return sorted(module.name for module in iter_modules(tests.kernels.cases.__path__))


def compile_cases(ops: list[str] | None = None) -> list[CompileCase]:
    """Return the cases of some ops, or of all."""
    cases = [case for op in ops or op_names() for case in import_module(f"tests.kernels.cases.{op}").compile_cases()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)
    return cases


def compile_for(case: CompileCase, capability: int) -> Any:
    """Compile a case for a GPU of this compute capability (80, 86, 89, 90, 120), with PDL where it is launched so.

    Returns Triton's CompiledKernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from edgelm.kernels.pdl import FIRST_CAPABILITY

    names = case.fn.arg_names
    pdl = {"launch_pdl": capability >= FIRST_CAPABILITY} if "launch_pdl" in names else {}  # the last one
    signature = case.signature | dict.fromkeys(pdl, "constexpr")
    assert list(signature) == list(names), f"{case.name}: the signature is not {names}"
    values = case.constants | pdl
    signature = {name: "constexpr" if name in values else kind for name, kind in signature.items()}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in values]
    assert not missing, f"{case.name}: no value for {missing}"
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    constants = {(names.index(name),): value for name, value in values.items()}
    source = ASTSource(case.fn, signature, constants, attrs)
    options = {"enable_fp_fusion": True} | dict(case.options) | {"num_warps": case.num_warps} | pdl
    if capability in case.most_registers:
        options["maxnreg"] = case.most_registers[capability]
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
