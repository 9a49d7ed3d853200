"""The chat template of a file that the user chose in place of the model's own."""

from __future__ import annotations

from pathlib import Path

from edgelm.base.errors import ModelError

MAX_BYTES = 2**20


def read_template_file(name: str) -> str:
    """Return the template in a file. Raises ModelError if it cannot be read, or is no text."""
    try:
        with Path(name).expanduser().open("rb") as file:
            source = file.read(MAX_BYTES + 1)
        if len(source) > MAX_BYTES:
            raise ModelError(f"the template {name} is longer than {MAX_BYTES:,} bytes", "give a Jinja file")
        return source.decode()
    except OSError as error:
        raise ModelError(f"the template {name} cannot be read: {error.strerror}", "give another --template") from None
    except UnicodeDecodeError:
        raise ModelError(f"the template {name} is not UTF-8", "give a Jinja file") from None
    except RuntimeError:
        raise ModelError(f"the template {name} cannot be read: no such user", "give another --template") from None
