"""What the installed llama.cpp is and what it uses of this processor: one JSON line, printed by a child process."""

from __future__ import annotations

import json

from llama_cpp import llama_cpp as L

from edgelm.executors.llama_api import start_backend


def main() -> None:
    """Print the facts; the features are those that the library was compiled for and found."""
    start_backend()
    parts = [part.strip() for part in L.llama_print_system_info().decode().replace(" : ", " | ").split("|")]
    features = [name for part in parts if (name := part.removesuffix(" = 1")) != part]
    print(
        json.dumps(
            {
                "version": L.llama_version().decode(),
                "features": features,
                "gpu_offload": bool(L.llama_supports_gpu_offload()),
            }
        )
    )


if __name__ == "__main__":
    main()
