"""What a kernel is compiled for without a GPU: one `CompileCase` each, listed by its op.

Owns the description, the list of all ops' cases and the call of Triton's compiler. Knows nothing of what is made of
the machine code: tests/kernels/sass.py counts it, target.py looks for one attribute of it.

An op lists its cases in `compile_cases() -> list[CompileCase]` in its cases.py, and imports its kernels in there: they
exist only where Triton is installed, and compile only where TRITON_INTERPRET was not set when they were imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, NamedTuple

import edgelm.kernels


class CompileCase(NamedTuple):
    """A kernel with all that its machine code depends on, but for the GPU."""

    name: str  # op first: "matmul q4_k rows=8"
    fn: Any  # a triton.JITFunction
    signature: dict[str, str]  # every argument: "*fp16", "*i32", "i32", "fp32", ..., "constexpr"
    constants: dict[str, object]  # values of the constexprs, and of arguments that are fixed (None, 1)
    divisible: tuple[str, ...] = ()  # arguments divisible by 16, as Triton finds of aligned tensors at a launch
    num_warps: int = 4
    options: Mapping[str, object] = MappingProxyType({})  # num_stages, launch_pdl, maxnreg, enable_fp_fusion (True)
    loop_weights: int = 0  # elements that one thread handles in one iteration of the main loop; 0: not counted
    budget: float | None = None  # instructions of a thread per element in the main loop, at most, on sm_90
    wide_loads: bool = True  # the main loop reads its weights, or its keys and values, 16 bytes at a time
    main: bool = True  # may be one of the few that every run of the tests compiles; False: with --soak only


def op_names() -> list[str]:
    """Return the folders beside this file that are ops: those with a module `cases`."""
    packages = [found.name for found in iter_modules(edgelm.kernels.__path__) if found.ispkg]
    folders = {name: import_module(f"edgelm.kernels.{name}").__path__ for name in packages}
    return sorted(name for name, path in folders.items() if any(found.name == "cases" for found in iter_modules(path)))


def compile_cases(ops: list[str] | None = None) -> list[CompileCase]:
    """Return the cases of some ops, or of all."""
    cases: list[CompileCase] = []
    for op in op_names() if ops is None else ops:
        listed = getattr(import_module(f"edgelm.kernels.{op}.cases"), "compile_cases", None)
        cases += listed() if listed is not None else []
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)
    return cases


def compile_for(case: CompileCase, capability: int) -> Any:
    """Compile a case for a GPU of this compute capability (80, 86, 89, 90, 120); no GPU is needed.

    Returns Triton's CompiledKernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.fn.arg_names
    assert list(case.signature) == list(names), f"{case.name}: the signature is not {names}"
    signature = {name: "constexpr" if name in case.constants else kind for name, kind in case.signature.items()}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in case.constants]
    assert not missing, f"{case.name}: no value for {missing}"
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(case.fn, signature, constants, attrs)
    options = {"enable_fp_fusion": True} | dict(case.options) | {"num_warps": case.num_warps}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
