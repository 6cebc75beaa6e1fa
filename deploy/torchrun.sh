#!/usr/bin/env bash
# A coordinator, and N workers that torchrun starts and watches, on this machine:
#
#     deploy/torchrun.sh N train.py --its --own --options
#
# torchrun sets RANK and WORLD_SIZE for every worker. `gradserver` and `torchrun` must be on PATH.

set -euo pipefail

workers=${1:?"usage: torchrun.sh NUMBER_OF_WORKERS SCRIPT [OPTIONS]"}
shift

# Port 0 takes a free one. The coordinator's first line names it: listening on tcp://127.0.0.1:PORT
coproc coordinator { exec gradserver serve --bind tcp://127.0.0.1:0 --workers "$workers"; }
pid=$coordinator_PID
trap 'kill "$pid" 2>/dev/null && wait "$pid" || true' EXIT
read -r _ _ GRADSERVER_URL <&"${coordinator[0]}"
export GRADSERVER_URL

torchrun --standalone --nproc-per-node "$workers" "$@"
