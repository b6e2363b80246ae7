#!/usr/bin/env bash
# Sets up .venv with what the tests need and runs them, on the CPU. Arguments go to pytest:
#   launch/test.sh                           everything but the tests that take minutes each
#   launch/test.sh -m slow                   those
#   launch/test.sh tests/test_doctor.py -x   some
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"

pega_setup dev
cd "$PEGA_ROOT"
exec "$PEGA_VENV/bin/python" -m pytest -q -m "not slow" "$@"
