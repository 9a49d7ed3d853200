"""Time to list and search many chats.

    python -m tests.bench.bench_chats [--chats 10000] [--messages 10]

Prints medians and the slowest of several calls. Times are of one processor (`time.process_time`): a busy machine prints
about the same. `through the thread` is the path of the sidebar: a read that is queued to the store's thread, as the
chat does it. The messages are of random words, as rare as words of a language are (Zipf's law). Limit of the issue:
100 ms with 10,000 chats.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from edgelm import __version__
from edgelm.chats.history import Chat, Message
from edgelm.chats.store import Store
from edgelm.chats.store_thread import StoreThread

CALLS = 15
DAY_S = 86_400


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--messages", type=int, default=10)
    options = parser.parse_args()
    print(f"edgelm {__version__}, SQLite {sqlite3.sqlite_version}, {platform.machine()}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "chats.db")
        words = fill(path, options.chats, options.messages)
        print(f"{options.chats:,} chats of {options.messages} messages, {path.stat().st_size / 1e6:.0f} MB")
        measure(path, words)


def fill(path: Path, num_chats: int, num_messages: int) -> list[str]:
    """Write the chats; return the words, the most frequent first."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = list(dict.fromkeys("".join(rng.choices(letters, k=rng.randrange(2, 11))) for _ in range(40_000)))
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(words))))
    store = Store(path)
    with store.transaction():
        for number in range(num_chats):
            changed = time.time() - DAY_S * (num_chats - number) / 10
            chat = Chat(title=" ".join(rng.choices(words, cum_weights=weights, k=6)), model="qwen3:4b", changed=changed)
            chat.tags = ("work", "python") if number % 10 == 0 else ()
            chat.sampling = {"temperature": 0.5} if number % 5 == 0 else {}
            store.put_chat(chat)
            parent = None
            for place in range(num_messages):
                text = " ".join(rng.choices(words, cum_weights=weights, k=rng.randrange(10, 110)))
                role = "assistant" if place % 2 else "user"
                message = Message(chat=chat.id, parent=parent, role=role, text=text)  # type: ignore[arg-type]
                store.put_message(message)
                parent = message.id
            chat.leaf = parent
            store.put_chat(chat)
    store.close()
    return words


def measure(path: Path, words: list[str]) -> None:
    """Print the time of each read."""
    rare = words[len(words) // 2]
    searches = {
        "a frequent word": words[0],
        "a word in every tenth message": words[40],
        "a rare word": rare,
        "two words": f"{words[3]} {words[60]}",
        "the first letter of many words": "e",
        "two letters": "th",
        "no word of any message": "zzqqxx",
        "the middle of a word": rare[2:-1],
        "signs": "%%",
    }
    store = Store(path)
    show("list", Store.chats, store)
    for name, query in searches.items():
        show(f"search, {name}", lambda store, query=query: store.search(query), store)
    store.close()
    thread = StoreThread(path, lambda _: None)
    for name, read in (("list", Store.chats), ("search, a frequent word", lambda store: store.search(words[0]))):
        thread.read(lambda _: None).result()
        times = [timed(lambda read=read: thread.read(read).result()) for _ in range(CALLS)]
        print(f"{name}, through the thread: {1e3 * statistics.median(times):.0f} ms, slowest {1e3 * max(times):.0f} ms")
    thread.close(10)


def show(name: str, read: Callable[[Store], list[object]], store: Store) -> None:
    """Print the time of a read, and how much it returns."""
    found = len(read(store))
    times = [timed(lambda: read(store)) for _ in range(CALLS)]
    print(f"{name}: {1e3 * statistics.median(times):.0f} ms, slowest {1e3 * max(times):.0f} ms ({found:,} found)")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
