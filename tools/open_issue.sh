#!/bin/sh
# Opens an issue with what a weekly job found, or adds to the one that is open.
#   open_issue.sh TITLE RESULTS.json
set -eu
body="$(mktemp)"
python3 tools/failures.py "$2" >"$body"
number="$(gh issue list --state open --search "in:title \"$1\"" --json number --jq '.[0].number // ""')"
if [ -n "$number" ]; then
  gh issue comment "$number" --body-file "$body"
else
  gh issue create --title "$1" --body-file "$body"
fi
