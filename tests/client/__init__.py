"""Tests of the front and the engine processes."""
