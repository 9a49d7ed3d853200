"""The commands of the chat: their table, their keys and what each does."""
