"""The jobs of a worker that has loaded a model: a completion, a speed test, an evaluation."""
