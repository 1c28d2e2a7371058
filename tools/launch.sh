#!/bin/sh
# What the tests of `shoal launch` need beside `make setup` (tests/e2e/test_launch_*.py): sshd and Slurm. As root; the tests start the daemons.
set -eu
apt-get update -qq
DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends openssh-server munge slurmctld slurmd slurm-client
