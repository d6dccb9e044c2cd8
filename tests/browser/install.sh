#!/bin/sh
# What the tests of pages need: Chromium from the distribution, and the library that drives it.
set -eu
command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
"${PYTHON:-python}" -m pip install -q "playwright>=1.50" pillow
