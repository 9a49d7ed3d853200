"""Chats of other programs, read from their exports.

json_stream.py reads a file piece by piece, a module for each program turns one conversation into a draft, and save.py
writes drafts into the store. Knows nothing of commands and screens.
"""
