"""The names of the formats that chats are written in and read from: a module of its own, since the flags name them."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["md", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
Source = Literal["auto", "chatgpt", "openwebui", "ollama", "edgelm"]
