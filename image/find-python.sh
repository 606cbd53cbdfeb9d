#!/bin/sh
# Print the path of a Python that can run Ratchet: $PYTHON if set, else the one of .venv, else python3, else the
# newest python3.x. In sh, because the python3 of some systems is too old to even parse our scripts.
set -u
cd "$(dirname "$0")/.." || exit 1

found=""
for python in ${PYTHON:-.venv/bin/python python3 python3.14 python3.13 python3.12 python3.11}; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case $version in
        3.1[1-9] | 3.[2-9][0-9]) command -v "$python"; exit 0 ;;
    esac
    found="$found $python is $version,"
done

if [ -n "$found" ]; then
    echo "setup: Ratchet needs Python 3.11 or newer;${found%,}: install one, or name it: make setup PYTHON=/path/to/python3.12" >&2
else
    echo "setup: no Python found (looked for ${PYTHON:-python3}): install Python 3.11 or newer, or name it: make setup PYTHON=/path/to/python3.12" >&2
fi
exit 1
