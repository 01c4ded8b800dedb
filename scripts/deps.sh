#!/usr/bin/env bash
# Installs what a target of the Makefile needs from the distribution's
# packages, and says what it installs. With SKIP_DEPS=1 it only checks.
#   scripts/deps.sh demo|test|bench
set -euo pipefail

declare -A package=(
  [ip]=iproute2 [curl]=curl [python3]=python3 [openssl]=openssl
  [dig]=dnsutils [ping]=iputils-ping [git]=git [gcc]=gcc
  [jq]=jq [setpriv]=util-linux [newuidmap]=uidmap
)
case "${1:-demo}" in
  demo) tools=(ip curl python3 openssl) ;;
  test) tools=(ip curl python3 openssl dig ping git gcc setpriv newuidmap jq) ;;
  bench) tools=() ;;
  *) echo "usage: $0 demo|test|bench" >&2; exit 2 ;;
esac

PATH=$PATH:/usr/sbin:/sbin
if ! command -v go >/dev/null; then
  echo "deps: Go 1.26 or newer is needed and was not found in PATH; see https://go.dev/doc/install" >&2
  exit 1
fi
# Go 1.21 and later fetch the toolchain that go.mod asks for; older ones only
# fail to read it.
if ! go env GOVERSION 2>/dev/null | grep -qE '^go1\.(2[1-9]|[3-9][0-9])|^go[2-9]|^devel'; then
  echo "deps: Go 1.26 or newer is needed, this is $(go version); see https://go.dev/doc/install" >&2
  exit 1
fi
missing=()
for tool in "${tools[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package[$tool]}")
done
# The certificate bundle is data, not a command.
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
# The race detector needs a C library's headers.
[ "${1:-demo}" != test ] || [ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
if [ "${SKIP_DEPS:-}" = 1 ]; then
  echo "deps: missing packages: ${missing[*]} (SKIP_DEPS=1: not installed)" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "deps: this system has no apt-get; install what stands for these Debian packages: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "deps: missing packages; as root run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo -n)
fi
echo "deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  cat "$log" >&2
  echo "deps: apt-get failed; as root run: apt-get install ${missing[*]}" >&2
  exit 1
fi
rm -f "$log"
