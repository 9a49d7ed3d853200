"""The client of an OpenAI-compatible endpoint, and the search for one on this machine.

Knows nothing of chats, screens and engines.
"""
