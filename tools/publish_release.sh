#!/bin/sh
# Publishes what `make release` left in build/release as a release of a tag.
#   publish_release.sh TAG
set -eu
gh release create "$1" build/release/*.tar.gz --title "$1" --notes-file build/release/notes.md --verify-tag
