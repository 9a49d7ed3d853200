"""The history of chats: its words, its SQLite file, the thread that writes it, and its export.

Knows nothing of models, endpoints and screens.
"""
