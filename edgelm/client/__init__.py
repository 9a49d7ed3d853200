"""The client of an OpenAI-compatible endpoint, and a front of its own on this machine.

Knows nothing of chats, screens and engines.
"""
