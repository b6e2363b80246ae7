#!/usr/bin/env bash
# Makes the pinned lists anew from pyproject.toml. Versions already in a list stay unless told otherwise:
#   requirements/compile.sh [--upgrade | --upgrade-package NAME]
# The lists hold versions and hashes only; where packages come from is the caller's uv setting.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch/env.sh"
cd "$PEGA_ROOT"

python=$(pega_python)
uv=$(pega_uv "$python")
compile=("$uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-annotate "$@")

"${compile[@]}" pyproject.toml --extra cpu --extra dynamo --extra voice -o requirements/cpu.txt
# Held to the run-time list, so that a set-up for development serves as one for running.
"${compile[@]}" pyproject.toml --extra cpu --extra dynamo --extra voice --extra dev -c requirements/cpu.txt \
  -o requirements/cpu-dev.txt
"${compile[@]}" pyproject.toml --extra cuda --extra dynamo --extra voice -o requirements/cuda.txt
"${compile[@]}" requirements/uv.in -o requirements/uv.txt
