#!/bin/sh
# Packs an initial file system for a cell: busybox, some kernel modules, an init.
#
#   pack.sh LINUX INIT OUTPUT MODULES [FILE=DEST]...
#
# LINUX is an unpacked kernel package, MODULES the names of modules (what they depend on
# comes along); each FILE is copied to DEST. Equal inputs give equal bytes. The archive is not compressed: most of it is a
# kernel that already is, and an emulated CPU takes longer to unpack than the loader to copy.
set -eu

linux=$1 init=$2 output=$3 modules=$4
shift 4

busybox=$(command -v busybox)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir "$root"

for dir in bin dev etc modules out proc root run share sys tmp; do mkdir "$root/$dir"; done
cp "$busybox" "$root/bin/busybox"
for applet in $("$busybox" --list); do
    [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
done
cp "$init" "$root/init"
chmod 755 "$root/init"
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"

# add MODULE: the module behind those that it depends on, numbered in load order.
number=10
add() {
    ! ls "$root"/modules/*-"$1".ko >/dev/null 2>&1 || return 0
    ! grep -q "/$1.ko\$" "$linux"/lib/modules/*/modules.builtin || return 0
    packed=$(find "$linux/lib/modules/" -name "$1.ko*")
    plain=$work/$1.ko
    case $packed in
    *.ko) cp "$packed" "$plain" ;;
    *.xz) xz -dc "$packed" >"$plain" ;;
    *.zst) zstd -qdc "$packed" >"$plain" ;;
    *) echo "guests: the kernel package has no module $1" >&2; exit 1 ;;
    esac
    for needed in $(grep -az '^depends=' "$plain" | tr ',\0' '  ' | sed 's/^depends=//'); do
        add "$needed"
    done
    mv "$work/$1.ko" "$root/modules/$number-$1.ko"
    number=$((number + 1))
}
for module in $modules; do add "$module"; done

for pair in "$@"; do
    dest=$root/${pair#*=}
    mkdir -p "$(dirname "$dest")"
    cp "${pair%%=*}" "$dest"
done

find "$root" -exec touch -h -d @0 {} +
(cd "$root" && find . -mindepth 1 | LC_ALL=C sort | cpio --quiet -o -H newc --reproducible -R 0:0) >"$output.new"
mv "$output.new" "$output"
