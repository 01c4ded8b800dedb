#!/usr/bin/env bash
# The whole way once, for real, on examples/shop: two Environments of one
# definition come up, are reached, refuse, are impaired and heal, and are gone.
# Each step says what it proves, and fails the demo when it does not.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/bin:$PATH:/usr/sbin:/sbin"

# The demo has a state root and a worktree of its own: nothing of the user's is
# touched, and everything can be counted at the end.
work=$(mktemp -d "${TMPDIR:-/tmp}/vz-demo.XXXXXX")
export XDG_STATE_HOME=$work/state XDG_RUNTIME_DIR=$work/run
mkdir -p "$XDG_STATE_HOME" "$XDG_RUNTIME_DIR"
chmod 700 "$XDG_RUNTIME_DIR"
unset VZ_ENVIRONMENT_ID VZ_MACHINE_ID
began=$(date +%s%N)

bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
if [ ! -t 1 ] || [ -n "${NO_COLOR:-}" ]; then bold='' dim='' green='' red='' plain=''; fi

step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
exec 3>&1  # what is shown goes here, even where a command's output is taken
run() { # shows a command, then runs it
  local line="$*"
  case $line in *$'\n'*) line="${line%%$'\n'*}'…'" ;; esac
  printf '%s$ %s%s\n' "$dim" "$line" "$plain" >&3
  "$@"
}
proved() { printf '%s✓%s %s\n' "$green" "$plain" "$*"; }
fail() {
  printf '%s✗ %s%s\n' "$red" "$*" "$plain" >&2
  for log in "$XDG_STATE_HOME"/vz/environments/*/supervisor.log; do
    [ -e "$log" ] && { echo "--- $log" >&2; tail -n 20 "$log" >&2; }
  done
  exit 1
}
cleanup() {
  status=$?
  if [ -d "$project" ]; then
    (cd "$project" && for name in blue green; do vz delete --environment $name --progress quiet >/dev/null 2>&1 || true; done)
  fi
  rm -rf "$work"
  exit $status
}
project=$work/shop
trap cleanup EXIT

# What there is of the demo's Environments on this host, whoever looks: their
# processes, the mounts, TAPs and network namespaces that these hold, sockets,
# control groups and files. Other people's Environments are not counted.
ids=()
traces() {
  local pattern=$work id process
  for id in "${ids[@]}"; do pattern+="|$id"; done
  for process in /proc/[0-9]*; do
    [ "${process#/proc/}" = $$ ] || [ "${process#/proc/}" = "$BASHPID" ] && continue
    if grep -qzE "$pattern" "$process/cmdline" 2>/dev/null || grep -qE "$pattern" "$process/cgroup" 2>/dev/null; then
      echo "process ${process#/proc/} $(tr '\0' ' ' <"$process/cmdline" 2>/dev/null)"
    fi
    grep -E "$pattern" "$process/mountinfo" 2>/dev/null | sed "s#^#mount of process ${process#/proc/}: #"
  done
  grep -E "$pattern" /proc/net/unix | sed 's/^/socket /' || true
  for id in "${ids[@]}"; do find /sys/fs/cgroup -type d -name "$id" 2>/dev/null; done
  find "$XDG_STATE_HOME/vz" -mindepth 1 2>/dev/null
  find "$XDG_RUNTIME_DIR" -mindepth 1 ! -path "$XDG_RUNTIME_DIR/vz" 2>/dev/null
}
etc() { sha256sum /etc/hosts /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt 2>/dev/null; }
etc_before=$(etc)

cp -r examples/shop "$project"
cd "$project"
git init -q . # bindings belong to a worktree

step "1. An Environment comes up: three Machines, two private networks, one simulated-public edge"
run vz up --environment blue || fail "vz up"

step "2. What it is, for people and for programs"
run vz status
run vz status --json | python3 -c 'import json,sys; e=json.load(sys.stdin); assert all(m["health"]=="HEALTH_SUPERVISED" for m in e["machines"]), e["machines"]; print("   ", len(e["machines"]), "machines, all supervised")' || fail "vz status --json"

step "3. Only declared paths carry traffic"
answer=$(run vz exec --machine web -- python3 -c '
import socket
s = socket.create_connection(("db", 5432), timeout=5)
print(s.recv(64).decode().strip())') || fail "web can't reach db:5432"
proved "web reaches db:5432 by name: $answer"
db=$(vz status --json | python3 -c 'import json,sys; print([a["address"] for m in json.load(sys.stdin)["machines"] if m["name"]=="db" for a in m["attachments"]][0])')
refused=$(run vz exec --machine client -- python3 -c '
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 5432), timeout=5)
except OSError as e:
    print(f"{e.strerror} after {(time.monotonic() - began) * 1000:.1f} ms")
else:
    sys.exit("it was not refused")' "$db") || fail "client reached db"
proved "client to $db:5432: $refused"
run vz exec --machine client -- python3 -c '
import socket, sys
try:
    socket.getaddrinfo("db", 5432)
except socket.gaierror as e:
    sys.exit(0 if e.errno == socket.EAI_NONAME else f"{e}")
sys.exit("the name resolved")' || fail "db resolves for client"
proved "the name db does not exist for client (NXDOMAIN)"
refusals=$(run vz-runtime-probe refusals)
grep "\"destination\":\"$db:5432\"" <<<"$refusals" || fail "the refusal was not counted"
queries=$(run vz-runtime-probe queries)
grep '"reason":"no path lets client reach db"' <<<"$queries" | tail -n 1 || fail "the denied name is not in the query log"
proved "both are counted, with the reason"
page=$(run vz exec --machine client -- curl -sS --fail https://shop.test/) || fail "client can't fetch https://shop.test/"
proved "client fetched https://shop.test/ and verified its chain: $(printf %s "$page" | grep -o '<h1>[^<]*</h1>')"

step "4. The host opens the same URL, without root and without touching /etc"
eval "$(vz status --json | python3 -c 'import json,sys; p=json.load(sys.stdin)["proxy"]; print("proxy=%s\nca=%s" % (p["url"], p["ca_path"]))')"
page=$(run curl -sS --fail --proxy "$proxy" --cacert "$ca" https://shop.test/) || fail "the host can't fetch https://shop.test/"
proved "the host fetched https://shop.test/ through $proxy: $(printf %s "$page" | grep -o '<h1>[^<]*</h1>')"

step "5. A seeded fault bites, and heals by itself"
round_trip() {
  vz exec --machine web -- python3 -c '
import socket, time
began = time.monotonic()
s = socket.create_connection(("'"$db"'", 5432), timeout=5)
print(round((time.monotonic() - began) * 1000))'
}
healthy=$(round_trip)
run vz-runtime-probe fault start slow-db --path web-db --latency 100ms --seed 42 --ttl 3s >/dev/null || fail "the fault was refused"
slow=$(round_trip)
sleep 3.2
healed=$(round_trip)
echo "connect web → db:  before $healthy ms,  during $slow ms,  after its TTL $healed ms"
[ "$slow" -ge 200 ] || fail "100 ms each way must make a connect take 200 ms"
[ "$healed" -lt 200 ] || fail "the fault did not heal"
run vz-runtime-probe receipts --kind fault | tail -n 1
run vz-runtime-probe receipts --verify || fail "the receipts do not verify"
proved "the latency was there while the fault was, and its receipt is signed and chained"

step "6. A second Environment of the same definition, side by side"
run vz up --environment green || fail "vz up green"
run vz status --all
mapfile -t ids < <(vz status --all --json | python3 -c 'import json,sys; print(*(e["environment_id"] for e in json.load(sys.stdin)["environments"]), sep="\n")')
[ -n "$(traces)" ] || fail "the check for leftovers sees nothing while two Environments are up"
run vz delete --environment blue || fail "vz delete blue"
run vz exec --environment green --machine client -- curl -sS --fail -o /dev/null https://shop.test/ || fail "green stopped serving"
proved "same names, addresses and ports twice; one was deleted, the other still serves"
run vz delete --environment green || fail "vz delete green"

step "7. Nothing is left"
left=$(traces)
[ -z "$left" ] || { echo "$left" | head -n 20 >&2; fail "something is left"; }
[ "$etc_before" = "$(etc)" ] || fail "/etc was touched"
proved "no process, namespace, mount, socket, TAP, control group or file but the empty state root; /etc is as it was"
printf '\n%sThe whole way in %.1f s.%s\n' "$bold" "$(($(date +%s%N) - began))e-9" "$plain"
