"""The types of `edgelm quantize --to auto`: the budget in bytes, and the search with llama.cpp's own quantization.

Runs in the worker. The search is in automatic.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from edgelm.backends.llama.build import machine_memory
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.summary import model_facts
from edgelm.making.quantization.automatic import Report, choose_types
from edgelm.making.quantization.calibration import calibration_text
from edgelm.making.quantization.file_size import fitting_bytes, parse_budget
from edgelm.making.quantization.job import QuantizeJob
from edgelm.making.quantization.native import Options, plan, quantize
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.search import Progress
from edgelm.making.quantization.sensitivity import Importance

PROBE = Recipe("Q8_0", pure=True)  # in its plan, all tensors that llama.cpp quantizes have other types than in F16


class NativeQuantizer:
    """llama.cpp's function, as the search takes it. A quantized source is allowed: the worker refused it before."""

    def __init__(self, threads: int) -> None:
        self._options = Options(allow_requantize=True, threads=threads)

    def matrices(self, source: GGUF) -> Collection[str]:
        """Return the names of the tensors that a quantization changes."""
        wide = {tensor.name: tensor.type for tensor in plan(source, Recipe("F16"), None, self._options)}
        planned = plan(source, PROBE, None, self._options)
        return {tensor.name for tensor in planned if tensor.asked or tensor.type != wide[tensor.name]}

    def write(self, source: GGUF, destination: Path, recipe: Recipe, importance: Importance | None) -> object:
        """Write a file by a recipe. Raises EdgeLMError."""
        return quantize(source, destination, recipe, importance, self._options)


def chosen_types(
    source: GGUF, job: QuantizeJob, importance: Importance | None, progress: Callable[[Progress], object]
) -> tuple[Recipe, Report]:
    """Return the types for the budget of a job, and how they were chosen. Raises EdgeLMError."""
    assert job.measurements is not None
    facts = model_facts(source)
    weights = sum(tensor.num_elements for tensor in source.tensors.values())
    budget = parse_budget(job.budget, weights) if job.budget else fitting_bytes(facts, job.settings, machine_memory())
    return choose_types(
        source.path,
        budget,
        calibration_text(job.calibration),
        importance,
        quantizer=NativeQuantizer(job.threads),
        cache=job.measurements,
        scratch=job.destination.parent,
        threads=job.threads,
        progress=progress,
    )
