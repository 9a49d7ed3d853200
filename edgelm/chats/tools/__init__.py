"""Tools for the chat, from servers of the Model Context Protocol (MCP): started, listed, called, and allowed.

Knows nothing of chats, answers and screens. The package `mcp` is imported when the first server is needed.
"""
