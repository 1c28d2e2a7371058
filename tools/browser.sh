#!/bin/sh
# What tests/e2e/test_page.py and docs/page.py need: the extra `browser`, and a Chromium from the system's packages or else playwright's own.
# usage: tools/browser.sh [PYTHON]
set -eu
python=${1:-.venv/bin/python}
"$python" -m pip install --quiet -e '.[browser,page]'
command -v chromium >/dev/null || command -v google-chrome >/dev/null && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core && exit 0
fi
"$python" -m playwright install --with-deps chromium
