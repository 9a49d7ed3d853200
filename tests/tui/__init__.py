"""Tests of the terminal chat: keys in, state and pictures out."""
