#!/usr/bin/env bash
# Makes .venv with edgelm installed in place, its development tools, and this machine's wheel of llama.cpp.
#
#     packaging/environment.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."

rm -f .venv/ready-*
echo "environment: .venv with $("$1" --version)" >&2
"$1" -m venv .venv
python=.venv/bin/python
wheel=$("$python" packaging/llama_wheel.py)
# torch first and by its exact version, so that whatever asks for it later finds it and does not choose another build.
"$python" -m pip install -qq "$(grep -om1 'torch==[^"]*' pyproject.toml)"
# pip takes an installed package of the same version for the same, and this wheel may be another build. What it needs
# comes with the next call.
"$python" -m pip install -qq --force-reinstall --no-deps "$wheel"
"$python" -m pip install -qq --editable '.[dev]'
