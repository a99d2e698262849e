#!/bin/bash
# Sees to it that this machine has what the Makefile needs, and chooses one toolchain for everything.
#
#   setup.sh TARGET      looks; adds what is missing (as root on Debian) or says what to type and ends
#                        with 2; writes the choice to TARGET/toolchain.mk
#   setup.sh packages    only adds packages (as root on Debian)
#
# It looks for what things can do, not for releases. When nothing has changed since the last time it
# takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."

targets='x86_64-unknown-none aarch64-unknown-none-softfloat'
oldest_rust=$(sed -n 's/^rust-version = "1\.\([0-9]*\)"$/\1/p' Cargo.toml)
oldest_qemu=9

say() { echo "setup: $*" >&2; }

# ---- What is there -------------------------------------------------------------------------------

# has_toolchain BIN: the compiler and tools in directory BIN are complete, new enough and can build for
# the bare-metal targets. Sets sysroot, and build_std to yes if the library must be built for that.
has_toolchain() {
    local bin=$1 tool target minor
    for tool in rustc cargo rustdoc rustfmt cargo-clippy cargo-fmt; do
        [ -x "$bin/$tool" ] || return 1
    done
    minor=$("$bin/rustc" --version 2>/dev/null | sed -n 's/^rustc 1\.\([0-9]*\)\..*/\1/p')
    [ "${minor:-0}" -ge "$oldest_rust" ] || return 1
    # A rustup proxy is there even when what it stands for is not.
    "$bin/cargo-clippy" --version >/dev/null 2>&1 && "$bin/rustfmt" --version >/dev/null 2>&1 || return 1
    sysroot=$("$bin/rustc" --print sysroot)
    build_std=no
    for target in $targets; do
        compgen -G "$sysroot/lib/rustlib/$target/lib/libcore-*.rlib" >/dev/null || build_std=yes
    done
    [ $build_std = no ] || [ -e "$sysroot/lib/rustlib/src/rust/library/core/src/lib.rs" ]
}

# choose_toolchain: the first directory in PATH, or else /usr/bin, that has one. Sets bin.
choose_toolchain() {
    local path
    IFS=: read -ra path <<<"$PATH:/usr/bin"
    for bin in "${path[@]}"; do
        if has_toolchain "$bin"; then return; fi
    done
    return 1
}

has_qemu() {
    local major
    major=$(qemu-system-x86_64 --version 2>/dev/null | sed -n 's/^QEMU emulator version \([0-9]*\)\..*/\1/p')
    [ "${major:-0}" -ge $oldest_qemu ] &&
        echo quit | qemu-system-x86_64 -M q35 -S -accel tcg -cpu qemu64,+x2apic,+svm,+npt,enforce \
            -display none -nodefaults -monitor stdio >/dev/null 2>&1
}

has_static_libc() { cc -print-file-name=libc.a 2>/dev/null | grep -q /; }

is_static() { ! ldd "$(command -v "$1")" >/dev/null 2>&1; }

# What is needed besides the toolchain: the test and what has it; with Debian's packages for it.
has() {
    case $1 in
    qemu) has_qemu ;;
    cc) command -v cc >/dev/null && has_static_libc ;;
    busybox) command -v busybox >/dev/null && is_static busybox ;;
    ovmf) [ -e /usr/share/OVMF/OVMF_CODE_4M.fd ] && [ -e /usr/share/OVMF/OVMF_VARS_4M.fd ] ;;
    grub-bios) [ -e /usr/lib/grub/i386-pc/multiboot2.mod ] ;;
    grub-uefi) [ -e /usr/lib/grub/x86_64-efi/multiboot2.mod ] ;;
    certificates) [ -e /etc/ssl/certs/ca-certificates.crt ] ;;
    *) command -v "$1" >/dev/null ;;
    esac
}
needs='qemu cc ld.lld setpriv busybox cpio xz ovmf grub-bios grub-uefi grub-mkrescue xorriso mformat
    shellcheck certificates'
packages_for() {
    case $1 in
    qemu) echo qemu-system-x86 ;;
    cc) echo gcc libc6-dev ;;
    ld.lld) echo lld ;;
    setpriv) echo util-linux ;;
    busybox) echo busybox-static ;;
    xz) echo xz-utils ;;
    grub-bios) echo grub-pc-bin ;;
    grub-uefi) echo grub-efi-amd64-bin ;;
    grub-mkrescue) echo grub-common ;;
    mformat) echo mtools ;;
    certificates) echo ca-certificates ;;
    *) echo "$1" ;;
    esac
}
describe() {
    case $1 in
    qemu) echo "QEMU $oldest_qemu or later for x86_64, with x2APIC under TCG" ;;
    cc) echo "a C compiler as linker, with a static C library" ;;
    busybox) echo "a static busybox" ;;
    ovmf) echo "OVMF (UEFI firmware for QEMU) in /usr/share/OVMF" ;;
    grub-bios) echo "GRUB's modules for the BIOS" ;;
    grub-uefi) echo "GRUB's modules for UEFI" ;;
    certificates) echo "the certificates of public web sites" ;;
    toolchain) echo "Rust 1.$oldest_rust or later with clippy and rustfmt, for $targets" ;;
    *) echo "$1" ;;
    esac
}

# look: sets missing, and bin, sysroot and build_std if there is a toolchain.
look() {
    local need
    missing=
    for need in $needs; do
        has "$need" || missing+=" $need"
    done
    choose_toolchain || missing+=" toolchain"
}

# ---- Adding it on Debian -------------------------------------------------------------------------

# version_part PACKAGE N: the Nth number of the version that apt would install; 0 if there is none.
version_part() {
    apt-cache policy "$1" 2>/dev/null |
        sed -n 's/^ *Candidate: \([0-9]*:\)\{0,1\}\([0-9].*\)/\2/p' | cut -d. -f"$2" | grep -o '^[0-9]*' || echo 0
}

# rust_packages: the distribution's toolchain that is new enough, with its library's source.
rust_packages() {
    if [ "$(version_part rustc-web 2)" -ge "$oldest_rust" ]; then
        echo rustc-web cargo-web rust-web-src rust-web-clippy rustfmt-web
    elif [ "$(version_part rustc 2)" -ge "$oldest_rust" ]; then
        echo rustc cargo rust-src rust-clippy rustfmt
    else
        say "no package source has a Rust compiler 1.$oldest_rust or later"
        return 1
    fi
}

codename() { sed -n 's/^VERSION_CODENAME=//p' /etc/os-release; }

# add_backports: makes the suite known that has a newer QEMU, from where this machine's packages come.
add_backports() {
    local codename uri file=/etc/apt/sources.list.d/bulkhead-backports.list keyring=
    codename=$(codename)
    # shellcheck disable=SC2016 # these are apt's variables
    uri=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n "s/^$codename //p" | head -n 1)
    [ -n "$uri" ] || { say "no package source of $codename is configured"; return 1; }
    [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ] ||
        keyring='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] '
    say "QEMU here is older than $oldest_qemu; adding the source of $codename-backports in $file"
    say "  (only QEMU and what it needs come from it; to remove it: rm $file && apt-get update)"
    echo "deb $keyring$uri $codename-backports main" >"$file"
    apt-get -qq update
}

# add_packages: installs what is missing.
add_packages() {
    local need packages=() newer=() backports
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C
    say "refreshing the package index"
    apt-get -qq update
    for need in $missing; do
        if [ "$need" = toolchain ]; then
            read -ra rust < <(rust_packages)
            packages+=("${rust[@]}")
        else
            read -ra found < <(packages_for "$need")
            packages+=("${found[@]}")
        fi
    done
    if [[ " $missing " == *' qemu '* ]] && [ "$(version_part qemu-system-x86 1)" -lt $oldest_qemu ]; then
        backports=$(codename)-backports
        apt-cache policy | grep -q "n=$backports,\|a=$backports," || add_backports
        # By itself, for what it depends on has to come from there too, and nothing else may.
        newer=(-t "$backports" qemu-system-x86)
        for need in "${!packages[@]}"; do
            [ "${packages[need]}" != qemu-system-x86 ] || unset "packages[need]"
        done
    fi
    [ ${#packages[@]} = 0 ] || install "${packages[@]}"
    [ ${#newer[@]} = 0 ] || install "${newer[@]}"
}

# install [OPTION]... PACKAGE...: says what that adds, and adds it.
install() {
    local install=(apt-get install --no-install-recommends)
    say "adding $*"
    "${install[@]}" --assume-no "$@" 2>/dev/null |
        sed -n -e '/newly installed/p' -e '/^Need to get/p' -e '/disk space/p' | sed 's/^/setup:   /' >&2 || true
    "${install[@]}" -qq -y "$@" >/dev/null
}

# ---- The work ------------------------------------------------------------------------------------

# fingerprint: changes when one of the things looked at does.
fingerprint() {
    local tool files=()
    for tool in qemu-system-x86_64 cc ld.lld setpriv busybox cpio xz grub-mkrescue xorriso mformat shellcheck \
        cargo rustc cargo-clippy rustfmt; do
        files+=("$(type -P "$tool" || echo "no-$tool")")
    done
    stat -L -c '%n %Y %s' "${files[@]}" tools/setup.sh Cargo.toml /usr/share/OVMF/OVMF_CODE_4M.fd \
        /usr/lib/grub/i386-pc/multiboot2.mod /usr/lib/grub/x86_64-efi/multiboot2.mod \
        "$HOME/.rustup/settings.toml" "${1:-/}"/lib/rustlib 2>/dev/null | cksum
}

# write_choice: tells the Makefile.
write_choice() {
    mkdir -p "$target"
    {
        echo "# Written by tools/setup.sh."
        echo "# fingerprint $(fingerprint "$sysroot")"
        echo "# sysroot $sysroot"
        echo "export PATH := $bin:\$(PATH)"
        echo "CARGO := $bin/cargo"
        if [ "$build_std" = yes ]; then
            # Building the library is not a stable feature. Exported for all of Cargo's calls: changing
            # it would build everything anew.
            echo "export RUSTC_BOOTSTRAP := 1"
            echo "BARE := --config tools/build-std.toml"
        fi
    } >"$target/toolchain.mk"
    say "Rust from $bin$([ "$build_std" = no ] || echo ', with its library built from source'), QEMU" \
        "$(qemu-system-x86_64 --version | sed -n '1s/.*version \([0-9.]*\).*/\1/p')"
}

is_debian() { [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }

if [ "${1:-}" = packages ]; then
    shift
    missing=" $*"
    add_packages
    exit 0
fi

target=${1:?usage: setup.sh TARGET}
known=$(sed -n 's/^# sysroot //p' "$target/toolchain.mk" 2>/dev/null || true)
if [ -n "$known" ] && grep -qxF "# fingerprint $(fingerprint "$known")" "$target/toolchain.mk"; then
    exit 0
fi

look
if [[ $missing == *' toolchain' ]] && command -v rustup >/dev/null && [ "$(id -u)" = 0 ]; then
    say "adding to rustup: $targets"
    # Where rustup's server is out of reach this fails, and the distribution's toolchain takes its place.
    # shellcheck disable=SC2086 # several words
    timeout 300 rustup target add $targets >/dev/null 2>&1 || say "rustup cannot get them here"
    look
fi
if [ -n "$missing" ]; then
    say "this machine lacks:"
    for need in $missing; do say "  $(describe "$need")"; done
    if ! is_debian; then
        say "install these, then type: make setup"
        exit 2
    elif [ "$(id -u)" != 0 ]; then
        if [ "$missing" = ' toolchain' ] && command -v rustup >/dev/null; then
            say "type: rustup target add $targets"
        else
            say "type: sudo tools/setup.sh packages$missing"
        fi
        exit 2
    fi
    add_packages
    look
    if [ -n "$missing" ]; then
        for need in $missing; do say "still missing: $(describe "$need")"; done
        exit 1
    fi
fi
write_choice
