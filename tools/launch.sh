#!/bin/sh
# What the tests of `shoal launch` need beside `make setup` (tests/e2e/test_launch_*.py): sshd, Slurm, Ray and the schemas of Kubernetes and SkyPilot.
# usage: tools/launch.sh [PYTHON]
set -eu
python=${1:-.venv/bin/python}
"$python" -m pip install --quiet -e '.[ray,recipes]'
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    # No daemon is started by its package: the tests start their own.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends openssh-server munge slurmctld slurmd slurm-client
fi
