"""What a model becomes when it is loaded: an engine that runs, and its text side."""

from __future__ import annotations

from dataclasses import dataclass

from edgelm.engine.engine import Engine
from edgelm.text.known_chats import KnownChats
from edgelm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that runs, and the text side of its model. Close the engine before dropping it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chats: KnownChats  # save them with the engine's end
