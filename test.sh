#!/usr/bin/env bash
# bash test.sh          the fast tests (under 4 minutes on 2 cores)
# bash test.sh all      the long ones too (under 30 minutes)
# Further arguments go to pytest: bash test.sh -k sampler
set -euo pipefail
cd "$(dirname "$0")"
. ./env.sh
if [ "${1:-}" = all ]; then shift; exec python -m pytest -q --durations=10 "$@"; fi
exec python -m pytest -q -m "not long" --durations=5 "$@"
