"""Tests of the engine on a fake executor whose output shows every wrong KV entry."""
