#!/usr/bin/env python3
"""Prints golden.json: the decision function of package faults, written a
second time, from its description in doc.go, with openssl's AES. What is in
golden.json is frozen; this prints more vectors when a kind gets a lane."""
import hashlib, hmac, json, struct, subprocess
from fractions import Fraction


def hkdf(secret, salt, info, n):
    prk = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(prk, info + b"\x01", hashlib.sha256).digest()[:n]


def aes(key, block):
    return subprocess.run(["openssl", "enc", "-aes-128-ecb", "-nopad", "-K", key.hex()],
                          input=block, stdout=subprocess.PIPE, check=True).stdout


def text(s):
    b = s.encode()
    return struct.pack(">I", len(b)) + b


def word(v):
    key = hkdf(struct.pack(">Q", int(v["seed"])), b"vz/faults/1",
               text(v["name"]) + struct.pack(">Q", int(v["revision"])), 16)
    flow = hashlib.sha256(
        bytes([v["direction"]]) + text(v["source"]) + text(v["destination"])
        + struct.pack(">BHQ", v["protocol"], v["port"], int(v["ordinal"]))).digest()[:16]
    point = struct.pack(">BBHIQ", v["class"], v["lane"] // 2, 0, v["attempt"], int(v["index"]))
    block = aes(key, bytes(a ^ b for a, b in zip(aes(key, flow), point)))
    return key.hex(), block[v["lane"] % 2 * 8:][:8].hex()


base = dict(seed="42", name="lossy", revision="0", direction=0, source="web", destination="db",
            protocol=6, port=5432, ordinal="0", lane=0, index="0", attempt=0)
base["class"] = 4
changes = [
    {}, {"seed": "0"}, {"seed": str(2**64 - 1)}, {"name": "ünï"}, {"name": ""}, {"revision": "1"},
    {"direction": 1}, {"source": "we", "destination": "bdb"}, {"destination": "endpoint:shop"},
    {"protocol": 17, "class": 6, "port": 53}, {"protocol": 1, "class": 7, "port": 0, "index": "65536"},
    {"port": 65535}, {"ordinal": "1"}, {"ordinal": str(2**40)}, {"class": 1}, {"class": 8},
    {"index": "1448"}, {"index": str(2**64 - 1)}, {"attempt": 1}, {"attempt": 2**32 - 1},
    {"lane": 1}, {"lane": 2}, {"lane": 3}, {"lane": 255},
]
vectors = []
for c in changes:
    v = base | c
    v["key"], v["word"] = word(v)
    vectors.append(v)

# The datagrams of one flow that a loss of p drops, among the first n.
def lost(p, n, **kw):
    v = base | {"protocol": 17, "port": 53, "class": 6} | kw
    t = round(Fraction(p) * 2**63)  # half to even
    out = []
    for i in range(n):
        v["index"] = str(i)
        if int(word(v)[1], 16) >> 1 < t:
            out.append(i)
    return {"probability": p, "count": n, "seed": v["seed"], "name": v["name"], "lost": out}


lists = [lost(0.01, 2000), lost(0.25, 100), lost(0.25, 100, seed="43"), lost(0.25, 100, name="lossy2")]
thresholds = [{"probability": p, "threshold": str(round(Fraction(p) * 2**63))}
              for p in (0, 1, 0.5, 0.01, 0.1, 1e-9, 0.3333333333333333, 0.9999999999999999)]
print(json.dumps({"words": vectors, "lists": lists, "thresholds": thresholds}, indent=1, ensure_ascii=False))
