#!/bin/sh
# The demo's part in the root cell: what demo.rs waits for, part by part. A line "=== PART" ends
# each; the first command that fails ends all.
#
# In /share are `question`, what is typed on the guest's console, and `answer`, what it ends with.
set -eu

part() { echo "=== $1"; }

uname -r
nproc
part root
cellctl node --json
part node

sha256sum /cells/vmlinuz
part kernel
cellctl create /cells/demo.cell.toml
nproc
part created

cellctl start demo
cellctl console demo --until '~ # ' --timeout 90s </dev/null
echo
part started

cellctl console demo --until "$(cat /share/answer)" --timeout 30s </share/question
echo
part answered

cellctl list
cellctl show demo
part listed
cellctl show demo --json
part shown

cellctl stop demo --timeout 60s
cellctl destroy demo
cellctl list
part destroyed

cat /sys/devices/system/cpu/online
nproc
part online
cellctl node --json
part node
