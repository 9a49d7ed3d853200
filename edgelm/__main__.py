"""The entry point of `edgelm`: signals, standard streams and exit codes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from io import TextIOWrapper
from types import FrameType


def main() -> None:
    """Run the command line and exit: 0, 1 (failed, one line says why), 2 (wrong usage), 130 (interrupted)."""
    if sys.platform == "win32":
        sys.exit("error: edgelm does not run on Windows itself; install it in WSL, where it runs as on Linux")
    _repair_streams()
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup lets it be ignored
        signal.signal(signal.SIGHUP, _leave)
    _count_gpus_by_bus()
    try:
        from edgelm.commands.cli import run_cli  # inside `try`: Ctrl-C during this import ends it too

        code = run_cli()
    except KeyboardInterrupt:
        code = 130
    gc.freeze()  # at its end, Python would look through everything for garbage: 60 ms
    sys.exit(code or _flush())


def _repair_streams() -> None:
    """Replace closed standard streams, and let an output that is not UTF-8 print every character of a model."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif number and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _count_gpus_by_bus() -> None:
    """Let CUDA count the GPUs as nvidia-smi does where the user names them by number: its own first is the fastest."""
    if any(name.strip().isdecimal() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def _leave(number: int, _: FrameType | None) -> None:
    """End on a signal after all clean-up: no worker and no temporary folder is left."""
    sys.exit(128 + number)


def _flush() -> int:
    """Write what is buffered; return the exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more when it ends
        if isinstance(error, BrokenPipeError):
            return 0  # the reader of our output has left
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
