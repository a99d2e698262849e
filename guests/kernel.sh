#!/bin/sh
# Fetches the distribution's cloud kernel, unmodified, for the root cell and the guest cells.
#
#   kernel.sh TARGET    writes TARGET/guests/vmlinuz and TARGET/guests/linux (the unpacked package)
#
# The package is the one that linux-image-cloud-amd64 depends on; apt checks it against the
# signed index. What is there already is not fetched again.
set -eu

target=$1
meta=linux-image-cloud-amd64

say() { echo "guests: $*" >&2; }

kernel_package() {
    apt-cache depends --important "$meta" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-.*-cloud-amd64\)$/\1/p' | head -n 1
}

refresh_index() {
    [ "$(id -u)" = 0 ] || { say "the package index has no $meta; type: sudo apt-get update"; exit 2; }
    apt-get -qq update
}

command -v apt-get >/dev/null || {
    say "the recipe for the cells' Linux needs Debian's apt; elsewhere name files: make node KERNEL=… INITRD=…"
    exit 2
}
mkdir -p "$target/downloads" "$target/guests"
target=$(cd "$target" && pwd)

package=$(kernel_package)
[ -n "$package" ] || { refresh_index; package=$(kernel_package); }
[ -n "$package" ] || { say "no package source has $meta"; exit 1; }

# apt's own download user cannot write here; it checks the file all the same.
fetch() { (cd "$target/downloads" && apt-get -qq -o APT::Sandbox::User=root download "$package"); }

say "fetching $package"
fetch || { refresh_index; package=$(kernel_package); fetch; }

rm -rf "$target/guests/linux.new"
dpkg -x "$(find "$target/downloads" -name "${package}_*.deb" -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)" \
    "$target/guests/linux.new"
# Newer packages have the modules under /usr only.
[ -e "$target/guests/linux.new/lib/modules" ] || ln -s usr/lib "$target/guests/linux.new/lib"
rm -rf "$target/guests/linux"
mv "$target/guests/linux.new" "$target/guests/linux"
cp "$target/guests/linux/boot/vmlinuz-${package#linux-image-}" "$target/guests/vmlinuz.new"
mv "$target/guests/vmlinuz.new" "$target/guests/vmlinuz"
