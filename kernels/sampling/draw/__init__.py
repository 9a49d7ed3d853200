"""The last pass of the Triton sampler: a row's threshold, and its token."""
