"""The jobs of a worker that has loaded a model: a completion, vectors, a speed test, an evaluation."""
