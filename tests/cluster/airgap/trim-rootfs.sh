#!/bin/sh
# mmdebstrap's last hook: makes a root file system small, and as pip-friendly as
# the official Python image is.
set -eu
root=$1
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*.log "$root"/var/log/apt
rm -rf "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
mkdir -p "$root"/var/lib/apt/lists/partial
find "$root"/usr/lib/python3* -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
