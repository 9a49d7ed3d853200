"""The chat history: its data types and exports, its SQLite file, and the thread that writes it.

Knows nothing of models, endpoints and screens.
"""
