#!/bin/sh
# What the tests of `shoal launch` need beside `make setup` (tests/e2e/test_launch_*.py, tests/project/test_manifests.py): sshd, Slurm, iproute2 and
# SkyPilot. As root; the tests start the daemons.
set -eu
apt-get update -qq
DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends openssh-server iproute2 munge slurmctld slurmd slurm-client
python3 -m venv build/skypilot # apart: it pins web frameworks to releases that Shoal's page does not want
build/skypilot/bin/pip install --quiet skypilot
