#!/bin/sh
# Init of a Linux guest cell: a shell on the console; the power button switches the cell off.
export PATH=/bin HOME=/root TERM=vt100

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
hostname guest-cell

for module in /modules/*.ko; do insmod "$module"; done

# acpid runs this when the power button is pressed. It wants a place for its log.
mkdir -p /etc/acpi/PWRF /var/log /var/run
printf '#!/bin/sh\npoweroff -f\n' >/etc/acpi/PWRF/00000080
chmod 755 /etc/acpi/PWRF/00000080
acpid

echo "guest: up on $(nproc) CPUs"
cd /root || exit
setsid cttyhack sh
poweroff -f
