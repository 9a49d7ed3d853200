"""Builds the launches of published points where Triton does not interpret: a program for a child process.

Its arguments are the names of points; without one, all points are built. A line of JSON for each: what was compiled,
or why it could not be.
"""

from __future__ import annotations

import json
import sys

from tests.kernels.performance.published import points
from tests.kernels.performance.published_builds import MissingPackageError


def main(names: list[str]) -> None:
    for point in points():
        if names and point.name not in names:
            continue
        line: dict[str, object] = {"point": point.name, "gpu": point.gpu}
        try:
            launches = [launch for build in (point.build, *point.others) for launch in build()]
        except MissingPackageError as error:
            line["missing"] = str(error)
        else:
            line["programs"] = [x * y * z for x, y, z in (launch.grid for launch in launches)]
            line["shared"] = [launch.compiled.metadata.shared for launch in launches]
            line["capabilities"] = [launch.compiled.metadata.target.arch for launch in launches]
            line["code"] = [len(launch.compiled.asm["cubin"]) for launch in launches]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
