#!/usr/bin/env bash
# Runs every fuzz target of the module for the given time each, two at once.
#   scripts/fuzz.sh 20s
set -euo pipefail
time=${1:-20s}
cd "$(dirname "$0")/.."
fuzz_one() {
  package=$1 target=$2 log=$(mktemp)
  if go test -run '^$' -fuzz "^$target\$" -fuzztime "$3" -fuzzminimizetime 10x -parallel 1 "$package" >"$log" 2>&1; then
    printf 'fuzz  %-45s %-24s ok (%s)\n' "$package" "$target" "$3"
  else
    cat "$log"
    printf 'fuzz  %-45s %-24s FAILED\n' "$package" "$target"
    rm -f "$log"
    exit 255 # xargs stops
  fi
  rm -f "$log"
}
export -f fuzz_one
git ls-files '*_test.go' | xargs grep -HEo '^func Fuzz[A-Za-z0-9_]+' |
  sed -E 's#^(.*)/[^/]+:func (Fuzz.*)$#./\1 \2#' | sort |
  xargs -P 2 -L 1 bash -c 'fuzz_one "$0" "$1" '"$time"
