#!/bin/sh
# Init of the root cell.
#
# Brings up devices and network, says where it runs, then does the job that the starter gave it,
# or offers a shell on the console when there is none.
#
# There is a job if the kernel's command line has the word bulkhead.job. It comes on a disk with the serial number bulkhead-job: a tar archive of `nonce` (a word)
# and `cmd` (a shell script). The disk bulkhead-share is an archive of /share. What the script prints
# goes to the second serial port, between a line RS NONCE ":start" and RS NONCE ":STATUS" (RS is
# the byte 036). Before the latter, /out is written as an archive to the disk bulkhead-out.
export PATH=/bin HOME=/root TERM=vt100

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts devpts /dev/pts
hostname root-cell

for module in /modules/*.ko; do insmod "$module"; done

# The loopback device and the first Ethernet card, as QEMU's user network and a plain bridge have it.
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then
    ip link set eth0 up
    ip address add 10.0.2.15/24 dev eth0
    ip route add default via 10.0.2.2
fi

# disk SERIAL: the block device with that serial number.
disk() {
    for device in /sys/block/*; do
        if [ "$(cat "$device/serial" 2>/dev/null)" = "$1" ]; then
            echo "/dev/${device##*/}"
            return
        fi
    done
}

# field NAME: the value of a top-level field of the JSON object on one line of standard input.
field() { sed -n 's/.*"'"$1"'": *"\{0,1\}\([^",}]*\).*/\1/p'; }

# The management device is a virtio socket (device type 0x13).
if grep -qs 0x0013 /sys/bus/virtio/devices/*/device && [ -x /bin/cellctl ]; then
    if node=$(cellctl node --json | tr -d '\n'); then
        echo "bulkhead: root cell on $(echo "$node" | field name)," \
            "hypervisor $(echo "$node" | field version)," \
            "boot=$(echo "$node" | field boot)," \
            "cpus=$(nproc)," \
            "memory=$(($(echo "$node" | field root_memory) >> 20))M"
    fi
fi

# Ends with STATUS, told to the starter.
finish() {
    printf '\036%s:%d\n' "$nonce" "$1" >/dev/ttyS1
    poweroff -f
}

if grep -qw bulkhead.job /proc/cmdline; then
    mkdir /job
    if ! tar -xf "$(disk bulkhead-job)" -C /job; then
        echo "bulkhead: the job cannot be read"
        poweroff -f
    fi
    nonce=$(cat /job/nonce)
    stty -F /dev/ttyS1 115200 raw -echo
    share=$(disk bulkhead-share)
    if [ -n "$share" ]; then
        tar -xf "$share" -C /share || finish 125
    fi
    printf '\036%s:start\n' "$nonce" >/dev/ttyS1
    cd /root || finish 125
    setsid sh /job/cmd >/dev/ttyS1 2>&1 </dev/null
    status=$?
    out=$(disk bulkhead-out)
    if [ -n "$out" ]; then
        tar -cf "$out" -C /out . && sync || status=125
    fi
    finish "$status"
fi

cd /root || exit
setsid cttyhack sh
poweroff -f
